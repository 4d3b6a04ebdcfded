"""What a batch means for a table: which rows meet, and what becomes of them; no engine is known here."""
