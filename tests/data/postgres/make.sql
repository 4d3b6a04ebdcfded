-- How changes.jsonl and changes.csv were written, by PostgreSQL 15.18:
--   psql -q -f make.sql
--   psql -At -c "SELECT row_to_json(c) FROM customer_changes c ORDER BY lsn" > changes.jsonl
--   psql -q -c "COPY (SELECT lsn, op, changed_at, id, name, note, balance, vip FROM customer_changes ORDER BY lsn)
--               TO STDOUT WITH (FORMAT csv, HEADER)" > changes.csv
-- The changes of a table, captured by a trigger into a table of changes.
CREATE TABLE customers (id bigint PRIMARY KEY, name text, note text, balance numeric(12,2), tags text[], vip boolean);
CREATE TABLE customer_changes (
    lsn bigint GENERATED ALWAYS AS IDENTITY, op char(1), changed_at timestamptz, id bigint, name text, note text,
    balance numeric(12,2), tags text[], vip boolean);
CREATE FUNCTION capture() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE r customers := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    INSERT INTO customer_changes (op, changed_at, id, name, note, balance, tags, vip)
    VALUES (lower(left(TG_OP, 1)), '2024-05-01 12:00:00.123456+02'::timestamptz + r.id * interval '1 minute',
            r.id, r.name, r.note, r.balance, r.tags, r.vip);
    RETURN NULL;
END $$;
CREATE TRIGGER capture AFTER INSERT OR UPDATE OR DELETE ON customers FOR EACH ROW EXECUTE FUNCTION capture();
INSERT INTO customers VALUES
    (1, 'O''Brien, "Pat"', E'two\nlines', 12.50, '{a,"b c"}', true),
    (2, 'Zoë 🙂', '', 0.10, '{}', false),
    (3, 'Back\slash', NULL, NULL, NULL, NULL),
    (4, 'gone', 'to be deleted', 1.00, NULL, false);
UPDATE customers SET balance = 99999999.99 WHERE id = 2;
UPDATE customers SET note = E'he said "no",\nthen\tleft' WHERE id = 3;
DELETE FROM customers WHERE id = 4;
