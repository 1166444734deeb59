//! What a wrong `#[profiled]` says, and where.

#[test]
fn errors_say_what_is_wrong_and_where() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
