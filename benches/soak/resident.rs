//! A thread that exists all the time, in a span that lasts for a whole cycle.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;
use std::time::Duration;

use tracing::{error, info_span};

use crate::phases::{Stage, burn};

const PAUSE: Duration = Duration::from_millis(50);
const BUSY: Duration = Duration::from_millis(2);

/// Controls that thread. An order is answered once the current part is done.
#[derive(Debug)]
pub(crate) struct Resident {
    orders: SyncSender<Order>,
    done: Receiver<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Begin,
    BeQuiet,
    GoOn,
    End,
}

impl Resident {
    pub(crate) fn start<'a>(scope: &'a Scope<'a, '_>, stage: &'a Stage) -> Self {
        // Each order is acknowledged.
        let (orders, to_follow) = sync_channel(1);
        let (send_done, done) = sync_channel(1);
        scope.spawn(move || stage.on_thread(|| live(stage, &to_follow, &send_done)));
        Self { orders, done }
    }

    /// The thread enters its span, and leaves it when the returned function is called.
    pub(crate) fn begin(&self) -> impl FnOnce() {
        self.order(Order::Begin);
        move || self.order(Order::End)
    }

    /// The thread does nothing during the action.
    pub(crate) fn quietly(&self, action: impl FnOnce()) {
        self.order(Order::BeQuiet);
        action();
        self.order(Order::GoOn);
    }

    fn order(&self, order: Order) {
        self.orders.send(order).expect("it lives");
        self.done.recv().expect("it lives");
    }
}

fn live(stage: &Stage, orders: &Receiver<Order>, done: &SyncSender<()>) {
    let send_done = || done.send(()).expect("the receiver waits");
    while let Ok(Order::Begin) = orders.recv() {
        send_done();
        let long = info_span!("long").entered();
        let mut parts = 0;
        loop {
            match orders.recv_timeout(PAUSE) {
                Ok(Order::BeQuiet) => {
                    send_done();
                    assert_eq!(orders.recv(), Ok(Order::GoOn));
                    send_done();
                }
                Ok(_) => break,
                Err(_) => {
                    let _part = info_span!("part").entered();
                    burn(BUSY);
                    error!("oh");
                    parts += 1;
                }
            }
        }
        drop(long);
        stage.truth.note("long", 1, 0);
        stage.truth.note("part", parts, parts);
        send_done();
    }
}
