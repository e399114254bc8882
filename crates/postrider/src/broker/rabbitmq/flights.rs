//! Which messages of a channel in confirm mode are answered: batches by delivery tag, without any I/O.

use std::collections::VecDeque;

use tokio::sync::oneshot;
use uuid::Uuid;

/// What is known of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// Nothing yet.
    Open,
    /// It came back; its ack follows.
    Returned,
    Acked,
    Nacked,
    /// It came back and was acked: no queue wanted it.
    Unroutable,
}

/// What became of a batch.
#[derive(Debug)]
pub(super) struct Landing {
    pub answers: Vec<Answer>,
    /// Why nothing more will be heard, if some are still open.
    pub down: Option<lapin::Error>,
}

struct Flight {
    first: u64,
    ids: Vec<Uuid>,
    answers: Vec<Answer>,
    unanswered: usize,
    /// Whether all of the batch was sent. Before that, everything answered means nothing.
    is_sent: bool,
    done: oneshot::Sender<Landing>,
}

impl Flight {
    fn end(&self) -> u64 {
        self.first + self.answers.len() as u64
    }

    fn answer(&mut self, tag: u64, is_ack: bool) {
        let Some(answer) = self.answers.get_mut((tag - self.first) as usize) else { return };
        *answer = match (*answer, is_ack) {
            (Answer::Open, true) => Answer::Acked,
            (Answer::Open, false) => Answer::Nacked,
            (Answer::Returned, _) => Answer::Unroutable,
            (answered, _) => return *answer = answered,
        };
        self.unanswered -= 1;
    }
}

/// The batches that are on their way, in the order of their delivery tags.
#[derive(Default)]
pub(super) struct Flights {
    open: VecDeque<Flight>,
    /// How many messages were sent on the channel. The next one's tag is one more.
    sent: u64,
}

impl Flights {
    /// Begins a batch; [`Flights::sent`] adds its messages, and no other batch may begin before [`Flights::all_sent`].
    pub fn begin(&mut self, size: usize) -> (u64, oneshot::Receiver<Landing>) {
        let (done, landing) = oneshot::channel();
        let first = self.sent + 1;
        let (ids, answers) = (Vec::with_capacity(size), Vec::with_capacity(size));
        // A batch that was dropped before its first message would share its tag with this one.
        self.open.retain(|flight| !(flight.first == first && flight.answers.is_empty()));
        self.open.push_back(Flight { first, ids, answers, unanswered: 0, is_sent: false, done });
        (first, landing)
    }

    /// The next message of the batch that began last.
    pub fn sent(&mut self, id: Uuid) {
        self.sent += 1;
        if let Some(flight) = self.open.back_mut() {
            flight.ids.push(id);
            flight.answers.push(Answer::Open);
            flight.unanswered += 1;
        }
    }

    /// The batch that began last is complete.
    pub fn all_sent(&mut self) {
        if let Some(flight) = self.open.back_mut() {
            flight.is_sent = true;
        }
        self.land();
    }

    /// The broker's answer to a message, or to all up to it.
    pub fn answered(&mut self, tag: u64, is_multiple: bool, is_ack: bool) {
        if is_multiple {
            // AMQP's 0 means all that are open.
            let last = if tag == 0 { self.sent } else { tag };
            for flight in self.open.iter_mut().take_while(|flight| flight.first <= last) {
                for tag in flight.first..flight.end().min(last + 1) {
                    flight.answer(tag, is_ack);
                }
            }
        } else {
            let at = self.open.partition_point(|flight| flight.first <= tag);
            if let Some(flight) = at.checked_sub(1).and_then(|at| self.open.get_mut(at)) {
                flight.answer(tag, is_ack);
            }
        }
        self.land();
    }

    /// A message came back. False if it is none of ours.
    pub fn returned(&mut self, id: Uuid) -> bool {
        let mut is_found = false;
        for flight in &mut self.open {
            for (_, answer) in flight.ids.iter().zip(&mut flight.answers).filter(|(sent, _)| **sent == id) {
                is_found = true;
                if *answer == Answer::Open {
                    *answer = Answer::Returned;
                }
            }
        }
        is_found
    }

    /// Nobody waits for the batch any longer; what is known of it.
    pub fn give_up(&mut self, first: u64) -> Vec<Answer> {
        let at = self.open.iter().position(|flight| flight.first == first);
        at.and_then(|at| self.open.remove(at)).map(|flight| flight.answers).unwrap_or_default()
    }

    /// Nothing more will be answered.
    pub fn fail(&mut self, down: &lapin::Error) {
        for Flight { answers, done, .. } in self.open.drain(..) {
            // Whoever waited may be gone.
            let _ = done.send(Landing { answers, down: Some(down.clone()) });
        }
    }

    fn land(&mut self) {
        // RabbitMQ mostly answers in order, but need not: one slow queue holds up its own messages alone.
        while let Some(at) = self.open.iter().position(|flight| flight.is_sent && flight.unanswered == 0) {
            if let Some(flight) = self.open.remove(at) {
                let _ = flight.done.send(Landing { answers: flight.answers, down: None });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> Uuid {
        Uuid::from_u128(n)
    }

    fn batch(flights: &mut Flights, ids: std::ops::Range<u128>) -> (u64, oneshot::Receiver<Landing>) {
        let begun = flights.begin(3);
        for n in ids {
            flights.sent(id(n));
        }
        flights.all_sent();
        begun
    }

    fn answers(landing: &mut oneshot::Receiver<Landing>) -> Vec<Answer> {
        landing.try_recv().unwrap().answers
    }

    #[test]
    fn a_batch_lands_when_all_of_it_is_answered() {
        let mut flights = Flights::default();
        let (_, mut a) = batch(&mut flights, 0..3);
        let (_, mut b) = batch(&mut flights, 3..5);
        flights.answered(2, true, true);
        assert!(a.try_recv().is_err());
        flights.answered(4, true, true);
        assert_eq!(answers(&mut a), [Answer::Acked; 3]);
        assert!(b.try_recv().is_err());
        flights.answered(5, false, false);
        assert_eq!(answers(&mut b), [Answer::Acked, Answer::Nacked]);
    }

    #[test]
    fn a_later_batch_may_land_first() {
        let mut flights = Flights::default();
        let (_, mut a) = batch(&mut flights, 0..1);
        let (_, mut b) = batch(&mut flights, 1..3);
        flights.answered(3, false, true);
        flights.answered(2, false, true);
        assert_eq!(answers(&mut b), [Answer::Acked; 2]);
        flights.answered(0, true, true);
        assert_eq!(answers(&mut a), [Answer::Acked]);
    }

    #[test]
    fn an_ack_while_the_batch_is_being_sent_does_not_land_it() {
        let mut flights = Flights::default();
        let (_, mut landing) = flights.begin(2);
        flights.sent(id(1));
        flights.answered(1, false, true);
        assert!(landing.try_recv().is_err());
        flights.sent(id(2));
        flights.all_sent();
        flights.answered(2, false, true);
        assert_eq!(answers(&mut landing), [Answer::Acked; 2]);
    }

    #[test]
    fn a_returned_message_is_unroutable_and_its_neighbours_are_not() {
        let mut flights = Flights::default();
        let (_, mut landing) = batch(&mut flights, 0..3);
        assert!(flights.returned(id(1)));
        assert!(!flights.returned(id(9)));
        flights.answered(3, true, true);
        assert_eq!(answers(&mut landing), [Answer::Acked, Answer::Unroutable, Answer::Acked]);
    }

    #[test]
    fn a_repeated_answer_counts_once() {
        let mut flights = Flights::default();
        let (_, mut landing) = batch(&mut flights, 0..2);
        flights.answered(1, false, true);
        flights.answered(1, false, false);
        flights.answered(1, true, true);
        assert!(landing.try_recv().is_err());
        flights.answered(7, false, true);
        flights.answered(2, false, true);
        assert_eq!(answers(&mut landing), [Answer::Acked; 2]);
    }

    #[test]
    fn a_batch_given_up_keeps_what_it_knows_and_shifts_no_tag() {
        let mut flights = Flights::default();
        let (first, _landing) = batch(&mut flights, 0..2);
        flights.answered(1, false, true);
        assert_eq!(flights.give_up(first), [Answer::Acked, Answer::Open]);
        let (_, mut next) = batch(&mut flights, 2..3);
        flights.answered(2, false, true);
        assert!(next.try_recv().is_err());
        flights.answered(3, false, true);
        assert_eq!(answers(&mut next), [Answer::Acked]);
    }

    #[test]
    fn a_lost_connection_leaves_what_was_not_answered_open() {
        let mut flights = Flights::default();
        let (_, mut landing) = batch(&mut flights, 0..2);
        flights.answered(1, false, true);
        flights.fail(&lapin::ErrorKind::MissingHeartbeatError.into());
        let landing = landing.try_recv().unwrap();
        assert_eq!(landing.answers, [Answer::Acked, Answer::Open]);
        assert!(landing.down.is_some());
    }

    #[test]
    fn a_batch_dropped_before_its_first_message_leaves_no_trace() {
        let mut flights = Flights::default();
        let (_, dropped) = flights.begin(2);
        drop(dropped);
        let (_, mut landing) = batch(&mut flights, 0..1);
        flights.answered(1, false, true);
        assert_eq!(answers(&mut landing), [Answer::Acked]);
    }
}
