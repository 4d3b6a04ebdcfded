"""A Kafka cluster, as Spark and as kafka-python see it."""
