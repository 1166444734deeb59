//! Measuring, and printing what was measured.

use std::time::Instant;

/// Prints a figure.
pub(crate) fn figure(name: &str, value: f64, unit: &str) {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    println!("figure {name} {value:.digits$} {unit}");
}

pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// Nanoseconds for each of `count` runs of `action`.
pub(crate) fn time_each(count: u32, mut action: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..count {
        action();
    }
    start.elapsed().as_nanos() as f64 / f64::from(count)
}

/// Runs the variants in turn, `rounds` times, and returns for each its times.
pub(crate) fn interleave(rounds: usize, variants: &mut [&mut dyn FnMut() -> f64]) -> Vec<Vec<f64>> {
    let mut times = vec![Vec::with_capacity(rounds); variants.len()];
    for round in 0..=rounds {
        for (variant, times) in variants.iter_mut().zip(&mut times) {
            let time = variant();
            // The first round warms up.
            if round > 0 {
                times.push(time);
            }
        }
    }
    times
}

/// The median of the differences, round by round.
pub(crate) fn added(base: &[f64], with: &[f64]) -> f64 {
    let mut differences: Vec<f64> = with.iter().zip(base).map(|(with, base)| with - base).collect();
    median(&mut differences)
}
