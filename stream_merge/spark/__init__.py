"""Private APIs of PySpark and of Delta's JVM; columns, files and confs."""
