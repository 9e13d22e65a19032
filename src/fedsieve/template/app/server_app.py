"""The server: leads the rounds and keeps what comes of them in `run-dir`."""

from flwr.app import Context

from app.task import OBJECTIVE, measure
from fedsieve.engines.flower import make_server_app
from fedsieve.engines.plan import Plan
from fedsieve.lead import lead
from fedsieve.plan import plan_from


def plan_for(context: Context) -> Plan:
    """What is agreed on, and what the server measures after every round."""
    return plan_from(context.run_config, OBJECTIVE, measure)


app = make_server_app(plan_for, lead)
