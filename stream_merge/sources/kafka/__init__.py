"""Connections to a Kafka cluster, for Spark and kafka-python."""
