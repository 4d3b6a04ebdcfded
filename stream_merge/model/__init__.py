"""Words and values of the whole package: no JVM, no input or output."""
