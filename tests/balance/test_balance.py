"""HAProxy and Envoy accept their configurations. HAProxy's is tried by a short form of the drill
`python -m tests.balance.drill`."""

import pytest

from tests.balance.drill import Drill, problems
from tests.balance.hosts import network
from tests.balance.load import Load
from tests.running_server import ROOT, segments_left
from tests.servers import output


@pytest.mark.needs("haproxy", "netns", "root")
def test_no_request_is_without_an_end_whatever_befalls_hosts_behind_haproxy() -> None:
    with network() as (balancer, hosts):
        folder = hosts[0].environ["DRILL_FOLDER"]
        with Load(balancer, folder, small=4, large=1, rpc=1) as load:
            drill = Drill(balancer, hosts, load, folder, settle_s=0.5)
            drill.run("steady", drill.steady)
            drill.run("slow", drill.slowness)
            drill.run("overload", drill.overload)
            drill.run("hanging", drill.hang)
            drill.run("rolling restart", lambda times: drill.rolling(times, hosts=1))
            drill.run("kill -9", drill.death)
            assert problems(drill) == []
            for trial in drill.trials.values():
                assert trial.tally.answered, trial
        for host in hosts:
            if host is not hosts[1]:  # which was killed
                host.stop()
                assert host.leaks() == []
    assert segments_left() == []


@pytest.mark.needs("envoy")
def test_envoy_takes_its_configuration() -> None:
    output("envoy", "--mode", "validate", "-c", ROOT / "deploy/envoy/envoy.yaml")
