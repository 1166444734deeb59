//! Only `tests/hostile` is of interest here.
