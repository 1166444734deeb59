//! Attributes of profiles and resources.

use std::fmt;

/// A value of an [`Attribute`], or of an attribute of a [`Resource`](super::Resource).
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text.
    String(String),
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Double(f64),
    /// A boolean.
    Bool(bool),
    /// Several values of one kind.
    Array(Vec<Self>),
}

impl Value {
    /// A number that may be larger than this can hold.
    pub fn of_number(number: u64) -> Self {
        Self::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::String(text) => f.write_str(text),
            Self::Int(number) => write!(f, "{number}"),
            Self::Double(number) => write!(f, "{number}"),
            Self::Bool(truth) => write!(f, "{truth}"),
            Self::Array(values) => {
                let values: Vec<_> = values.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", values.join(", "))
            }
        }
    }
}

macro_rules! value_from {
    ($($from:ty => $kind:ident),+) => {
        $(
            impl From<$from> for Value {
                fn from(value: $from) -> Self {
                    Self::$kind(value.into())
                }
            }
        )+
    };
}

impl<T: Into<Self>> From<Vec<T>> for Value {
    fn from(values: Vec<T>) -> Self {
        Self::Array(values.into_iter().map(Into::into).collect())
    }
}

value_from! { &str => String, String => String, i32 => Int, u32 => Int, i64 => Int, f64 => Double, bool => Bool }

/// An attribute of the whole profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Attribute {
    /// The name of the attribute.
    pub key: &'static str,
    /// The value of the attribute.
    pub value: Value,
}
