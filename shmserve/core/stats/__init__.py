"""Counters, and what is made of them: series, rates, what models report, incidents."""
