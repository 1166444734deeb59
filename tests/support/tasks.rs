//! Tasks that each burn CPU in their own function, inside a span of the same name.

use std::hint::black_box;

use tracing::{Span, info_span};
use tracing_profiling::profile::{Profile, Sample};

pub(crate) type Task = (&'static str, fn(u64) -> u64, fn() -> Span);

/// Defines, for each name, a function that burns CPU and a span.
macro_rules! tasks {
    ($($name:ident)*) => {
        $(
            #[inline(never)]
            fn $name(rounds: u64) -> u64 {
                // The name keeps the compiler from merging the functions.
                let mut x = rounds + black_box(stringify!($name)).len() as u64;
                let mut i = 0;
                while i < rounds {
                    x = black_box((x ^ i) * 3 % 1_000_003);
                    i += 1;
                }
                x
            }
        )*
        pub(crate) const TASKS: &[Task] =
            &[$((stringify!($name), $name, || info_span!(stringify!($name)))),*];
    };
}

tasks! {
    t00 t01 t02 t03 t04 t05 t06 t07 t08 t09 t10 t11 t12 t13 t14 t15
    t16 t17 t18 t19 t20 t21 t22 t23 t24 t25 t26 t27 t28 t29 t30 t31
    t32 t33 t34 t35 t36 t37 t38 t39 t40 t41 t42 t43 t44 t45 t46 t47
    t48 t49 t50 t51 t52 t53 t54 t55 t56 t57 t58 t59 t60 t61 t62 t63
}

/// The task whose function a sample has in its stack.
fn task_of<'a>(profile: &'a Profile, sample: &Sample) -> Option<&'a str> {
    profile
        .stack(sample.stack)
        .flat_map(|location| &location.lines)
        .filter_map(|line| profile.function(line.function))
        .filter_map(|function| function.name.rsplit("::").next())
        .find(|name| TASKS.iter().any(|(task, ..)| task == name))
}

/// The number of task samples under their own span, and a description of each that is not.
pub(crate) fn check(profile: &Profile) -> (usize, Vec<String>) {
    let (mut right, mut wrong) = (0, Vec::new());
    for sample in profile.samples() {
        let Some(task) = task_of(profile, sample) else { continue };
        let path = profile.span_path(sample.link);
        if path == ["root", task] {
            right += sample.points.len();
        } else {
            wrong.extend(sample.points.iter().map(|_| format!("{task} under {path:?}")));
        }
    }
    (right, wrong)
}
