"""A client that serves several methods, and misbehaves where the test says so."""

import json

from fedsieve.deployment.flower import make_client_app
from trial.faults import Faulty
from trial.task import plans, rows


class Several:
    """A site for each method; the fingerprint in a packet says whose it is."""

    def __init__(self, sites):
        self.sites = sites
        self.rows = next(iter(sites.values())).rows

    def visit(self, clock, message, client):
        return self.sites[int.from_bytes(message[4:8], "little")].visit(clock, message, client)


def site_for(context):
    client = context.node_config["partition-id"]
    faults = json.loads(context.run_config["test.faults"])
    each = {
        plan.fingerprint: (plan.client_engine(client, *rows(client)), faults.get(method, {})) for method, plan in plans(context.run_config)
    }
    return Several({fingerprint: Faulty(site, bad) for fingerprint, (site, bad) in each.items()})


app = make_client_app(site_for)
