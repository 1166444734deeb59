//! Without OpenTelemetry no order of layers is wrong.

#[derive(Debug, Default)]
pub(crate) struct LayerOrder;

impl LayerOrder {
    #[expect(clippy::unused_self, reason = "as where there is an order")]
    pub(crate) fn see_subscriber<S>(&self) {}

    #[expect(clippy::unused_self, reason = "as where there is an order")]
    pub(crate) fn suspect(&self) -> bool {
        false
    }

    #[expect(clippy::unused_self, reason = "as where there is an order")]
    pub(crate) fn look_at_enter(&self, _: u64) {}

    #[expect(clippy::unused_self, reason = "as where there is an order")]
    pub(crate) fn look_at_exit(&self, _: u64) -> bool {
        false
    }

    #[expect(clippy::unused_self, reason = "as where there is an order")]
    pub(crate) fn take_wrong(&self) -> bool {
        false
    }
}
