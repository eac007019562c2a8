"""What is shown of every result: records enter, tables leave."""
