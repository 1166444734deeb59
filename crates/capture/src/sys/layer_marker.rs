//! The unsafe words of `tracing_subscriber::Layer::downcast_raw`, which has to be implemented to answer whether a layer
//! filters itself. They are macros, since this crate knows no layer, and the crate that has one forbids `unsafe`.

/// The `downcast_raw` of a layer: `$answer` is a function of the layer that takes the type's id.
#[doc(hidden)]
#[macro_export]
macro_rules! downcast_through {
    ($($answer:tt)+) => {
        #[doc(hidden)]
        unsafe fn downcast_raw(&self, id: std::any::TypeId) -> Option<*const ()> {
            if id == std::any::TypeId::of::<Self>() {
                return Some(std::ptr::from_ref(self).cast());
            }
            self.$($answer)+(id)
        }
    };
}

/// What a layer answers when it is asked for the type with an id.
#[doc(hidden)]
#[macro_export]
macro_rules! answer_of {
    ($layer:expr, $id:expr) => {
        // SAFETY: nothing reads what the pointer leads to here. A caller reads it as the type with this id, as the contract
        // of `downcast_raw` says, which the implementation of `$layer` keeps.
        unsafe { $layer.downcast_raw($id) }
    };
}
