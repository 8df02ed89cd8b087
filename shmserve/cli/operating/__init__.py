"""Commands that ask a running server: tables, models, measurements."""
