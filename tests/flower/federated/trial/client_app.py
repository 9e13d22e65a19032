"""A client that serves several methods, and misbehaves where the test says so."""

import json

from fedsieve.engines.flower import make_client_app
from trial.faults import Faulty
from trial.task import plans, rows


class Several:
    """A site for each method; the fingerprint in a packet says whose it is."""

    def __init__(self, sites):
        self.sites = sites
        self.rows = sites[0].rows

    def visit(self, clock, message, client):
        (site,) = (site for site in self.sites if site.fingerprint == int.from_bytes(message[4:8], "little"))
        return site.visit(clock, message, client)


def site_for(context):
    client = context.node_config["partition-id"]
    sites = Several([plan.site(client, *rows(client)) for _, plan in plans(context.run_config)])
    faults = context.run_config["test.faults"]
    return Faulty(sites, json.loads(faults)) if faults else sites


app = make_client_app(site_for)
