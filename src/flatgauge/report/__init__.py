"""Results for people: tables, pages, plots."""
