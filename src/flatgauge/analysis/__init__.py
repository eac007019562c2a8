"""The public verbs and the records that they return."""
