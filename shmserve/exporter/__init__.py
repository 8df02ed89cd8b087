"""Exporter process: sends spans and metrics to an OpenTelemetry collector. A service has at most
one exporter.

Only this process imports OpenTelemetry's packages (the extra `otlp`). No process waits for the
exporter, and killing the exporter loses only unsent spans. OpenTelemetry's packages start threads,
so this process is exec'ed and never forks.
"""
