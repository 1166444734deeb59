//! The error messages for invalid uses of `#[profiled]`, and their positions.

#[test]
fn errors_say_what_is_wrong_and_where() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
