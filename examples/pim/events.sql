-- A product and its event, in one transaction.
BEGIN;
INSERT INTO products VALUES ('sku-1', 'Lamp');
INSERT INTO outbox_events (event_id, event_type, payload)
VALUES ('9d2f0c44-0000-4000-8000-000000000001', 'product.created', '{"sku": "sku-1", "name": "Lamp"}');
COMMIT;
BEGIN;
UPDATE products SET name = 'Desk lamp' WHERE sku = 'sku-1';
INSERT INTO outbox_events (event_id, event_type, payload)
VALUES ('9d2f0c44-0000-4000-8000-000000000002', 'product.renamed', '{"sku": "sku-1", "name": "Desk lamp"}');
COMMIT;
