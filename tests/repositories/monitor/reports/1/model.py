"""Reports its inputs as values, one of each kind; the name of one would hurt a careless page."""

from shmserve.executor.monitor import app_monitor

HURTFUL = "<img src=x onerror=document.title='hurt'>"


class Model:
    def infer(self, request):
        values = request.input("X")
        if values[0] < 0:
            raise ValueError("</script><script>document.title='hurt'</script>")
        for value in values:
            app_monitor.avg("mean", value)
            app_monitor.max("top", value)
            app_monitor.min("bottom", value)
            app_monitor.inc("sum", value)
            app_monitor.cdf("spread", value)
            app_monitor.inc(HURTFUL, 1)
        return {"Y": values}
