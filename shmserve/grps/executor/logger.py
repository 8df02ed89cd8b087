"""`clogger`: a project's own log lines, in the executor's log."""

import logging

clogger = logging.getLogger("grps.project")
logger = logging.getLogger("grps")
