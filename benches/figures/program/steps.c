/* The functions of all units of the program that symbols.rs links, in the order of the units. */

extern void *__start_steps[], *__stop_steps[];

void *const *program_steps(unsigned long *count)
{
    *count = __stop_steps - __start_steps;
    return __start_steps;
}
