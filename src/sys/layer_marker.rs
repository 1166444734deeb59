//! Answers the question of `tracing-subscriber` whether a layer filters itself.
#![allow(unsafe_code)]

use std::any::TypeId;

use tracing::Subscriber;
use tracing_subscriber::Layer;

/// What `layer` answers when it is asked for a type.
pub(crate) fn answer_of<S: Subscriber, L: Layer<S>>(layer: &L, id: TypeId) -> Option<*const ()> {
    // SAFETY: nothing reads what the pointer leads to here. A caller reads it as the type with this id, as the contract of
    // `downcast_raw` says, which the implementation of `layer` keeps.
    unsafe { layer.downcast_raw(id) }
}

/// The `downcast_raw` of a layer: `$answer` is a function of the layer that takes the type's id.
macro_rules! downcast_through {
    ($($answer:tt)+) => {
        #[doc(hidden)]
        #[allow(unsafe_code, reason = "the trait's method is unsafe")]
        unsafe fn downcast_raw(&self, id: std::any::TypeId) -> Option<*const ()> {
            if id == std::any::TypeId::of::<Self>() {
                return Some(std::ptr::from_ref(self).cast());
            }
            self.$($answer)+(id)
        }
    };
}
pub(crate) use downcast_through;
