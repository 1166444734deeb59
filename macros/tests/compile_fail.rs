//! The error messages for invalid uses of `#[profiled]`, and their positions.

#[test]
fn errors_state_the_problem_and_its_position() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
