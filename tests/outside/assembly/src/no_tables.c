// Three functions inside each other, with words in their frames that look like anything.

__attribute__((noinline)) static unsigned long innermost(unsigned long rounds, unsigned long *words) {
    unsigned long sum = 0;
    for (unsigned long i = 0; i < rounds; i++) {
        words[i % 64] += sum ^ i;
        sum += words[(i * 7) % 64];
    }
    return sum;
}

__attribute__((noinline)) static unsigned long middle(unsigned long rounds, void (*call)(void)) {
    volatile unsigned long room[64];
    unsigned long *words = (unsigned long *)room;
    for (int i = 0; i < 64; i++) {
        words[i] = (unsigned long)&middle + i;
    }
    unsigned long sum = innermost(rounds, words);
    call();
    return sum + words[3];
}

unsigned long NAME(no_tables)(unsigned long rounds, void (*call)(void)) {
    unsigned long sum = 1;
    for (int i = 0; i < 4; i++) {
        sum += middle(rounds + sum % 2, call);
    }
    return sum;
}
