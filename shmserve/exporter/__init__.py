"""The process that tells an OpenTelemetry collector of requests and numbers; there is at most one.

It alone imports OpenTelemetry's packages (the extra `otlp`). Nobody waits for it: it may be killed
at any moment, and takes nothing with it but the spans that it had.

OpenTelemetry's packages have threads, so this process is exec'ed and forks nothing.
"""
