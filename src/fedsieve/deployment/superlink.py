"""A superlink that accepts commands only from an account: `python -m fedsieve.deployment.superlink`, options as in flower-superlink.

Flower's superlink checks accounts only with a plugin that its open version lacks; without one, whoever reaches the port may run code.
Here the plugin is one token, in a file. The command `flwr` sends the token that is in its `credentials.yaml`.
"""

import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, AuthnType
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.superlink import config_loader
from flwr.superlink.auth_plugin import ControlAuthnPlugin
from flwr.superlink.cli import flower_superlink

from fedsieve.deployment.local_cluster import TOKEN_FILE_VARIABLE


class TokenAccount(ControlAuthnPlugin):
    """The account of those who know the token; nobody can log in."""

    def __init__(self) -> None:
        self.token = Path(os.environ[TOKEN_FILE_VARIABLE]).read_bytes()

    def get_login_details(self) -> AccountAuthLoginDetails | None:
        """Return None: there is no login."""

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:
        """Return None: there is no login."""

    def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[bool, AccountInfo | None]:
        """Return whether the token is right, and the account."""
        token = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        is_valid = hmac.compare_digest(token.encode() if isinstance(token, str) else token, self.token)
        return is_valid, AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME) if is_valid else None

    def refresh_tokens(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[Sequence[tuple[str, str | bytes]] | None, AccountInfo | None]:
        """Return nothing: the token is not refreshed."""
        return None, None


if __name__ == "__main__":
    os.environ["FLWR_OIDC_ENABLED"] = "1"
    config_loader.get_control_authn_ee_plugins = lambda: {AuthnType.OIDC: TokenAccount}  # pyright: ignore[reportPrivateImportUsage]
    flower_superlink()
