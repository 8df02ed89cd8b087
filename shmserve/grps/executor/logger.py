"""`clogger`: logger for a project's own lines, which go to the executor's log."""

import logging

clogger = logging.getLogger("grps.project")
logger = logging.getLogger("grps")
