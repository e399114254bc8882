-- Two students enrol in one course, each in one transaction with its event.
BEGIN;
INSERT INTO enrolments (course, student) VALUES ('c-1', 's-1');
INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload)
VALUES ('course.enrolled', 'course', 'c-1', '{"course": "c-1", "student": "s-1"}');
COMMIT;
BEGIN;
INSERT INTO enrolments (course, student) VALUES ('c-1', 's-2');
INSERT INTO outbox_events (routing_key, aggregate_type, aggregate_id, payload)
VALUES ('course.enrolled', 'course', 'c-1', '{"course": "c-1", "student": "s-2"}');
COMMIT;
