CREATE TABLE orders (id bigint PRIMARY KEY, customer text, price numeric(12,2), at timestamptz DEFAULT now());
ALTER TABLE orders REPLICA IDENTITY FULL;
INSERT INTO orders (id, customer, price) VALUES (1, 'Ada', 9.50), (2, 'Grace', 12.00);
