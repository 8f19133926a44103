"""Take secrets, user names and home folders out of text: command lines in manifests, and everything in an export.

Known limits, on purpose: a secret without a telling name or shape cannot be recognised, and a user name is replaced
where it stands as a path component or before an `@`, not inside words (a user called `data` must not spoil file names).
A host that is called by a word of this trade (`gpu`) is replaced after an `@` alone.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MASK = "***"
EMAIL = "EMAIL"
USER = "USER"
HOST = "HOST"

# An option, key or variable whose last word is one of these has a secret value ...
_SECRET_WORDS = {
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "pw",
    "credential",
    "credentials",
    "auth",
}
_SECRET_WORDS |= {"apikey", "authtoken", "accesstoken", "secretkey", "bearer", "cookie"}
# ... or `key` when one of these stands before it (`--api-key`, but not `--sort-key` or `--label-key`).
_KEY_KINDS = {
    "api",
    "access",
    "secret",
    "private",
    "auth",
    "ssh",
    "encryption",
    "license",
    "signing",
    "wandb",
    "account",
}
# Tokens of a text model are no secrets: --pad-token, --mask-token.
_MODEL_TOKENS = {
    "pad",
    "mask",
    "eos",
    "bos",
    "cls",
    "sep",
    "unk",
    "image",
    "special",
    "start",
    "end",
    "stop",
    "next",
    "per",
}

# Values that are secrets by their shape, whatever stands before them: the prefixes that the issuers document.
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|pypi-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_SHAPE_PREFIXES = ("hf_", "sk-", "gh", "glpat-", "xox", "AKIA", "ASIA", "AIza", "ya29.", "pypi-", "eyJ")
_MAIL = re.compile(r"(?<![\w.+-])(?!git@)[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}(?![\w-])")
# Names of machines that are as likely words of a recording.
_TRADE = {"gpu", "gpus", "cuda", "cpu", "nvidia", "train", "trainer", "worker", "node", "main", "host", "local"}
_TRADE |= {"test", "data", "model", "torch", "step", "run", "bench", "compute", "kernel", "linux", "ubuntu", "debian"}
_TRADE |= {"forward", "backward", "loader", "default", "master", "docker", "root", "build", "eval", "epoch", "server"}
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
# A name that ends like a secret's, then = or : and a value, quoted or not; the length is bounded to keep the search linear.
_ASSIGNMENT = re.compile(
    r"(?i)(?<![\w.-])(?P<name>[\w.-]{0,60}?(?:token|secret|passw(?:or)?d|passphrase|pwd|pw|credentials?|auth|bearer|cookie|key))"
    r"(?P<equals>[\"']?\s*[=:]\s*[\"']?)(?!(?:bearer|basic)\s|\*\*\*)(?P<value>[^\s&;,'\"]+)"
)
_BEARER = re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.+/=-]{8,}")


@dataclass(frozen=True)
class Scrubber:
    """Replaces what names a person or opens a door. home, user, host: of whoever made the recording; "" = unknown.

    secrets: values that are known to be secret, replaced wherever they stand.
    """

    home: str
    user: str
    host: str
    secrets: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls) -> Scrubber:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's uid without a passwd entry
            user = ""
        return cls(str(Path.home()), user, socket.gethostname(), secret_values(os.environ))

    def text(self, text: str) -> str:
        """Secrets masked, the home folder as `~`, other homes as /home/USER, user and host names replaced."""
        text = _BEARER.sub(rf"\1{MASK}", text)
        text = _ASSIGNMENT.sub(_mask_assignment, text)
        return self.trace(text)

    def trace(self, text: str) -> str:
        """As `text` but for `name=value`, which in kernel names (`token::copy`) and in raw JSON means other things."""
        # Each pattern is preceded by a search for a plain string, which is 50 times quicker and mostly finds nothing:
        # traces come in blocks of megabytes.
        if any(prefix in text for prefix in _SHAPE_PREFIXES):
            text = _SHAPES.sub(MASK, text)
        if "://" in text and "@" in text:
            text = _URL_LOGIN.sub(MASK, text)
        for secret in self.secrets:
            text = text.replace(secret, MASK)
        if self._home and self.home.rstrip("/") in text:
            text = self._home.sub("~", text)
        if "/home/" in text or "/Users/" in text or "Users\\" in text:
            text = _OTHER_HOMES.sub(rf"\1{USER}", text)
        if self._user and self.user in text:
            text = self._user.sub(USER, text)
        if self._host and self.host in text:
            text = self._host.sub(HOST, text)
        if "@" in text:
            text = _MAIL.sub(EMAIL, text)
        return text

    def command(self, argv: Sequence[str]) -> tuple[str, ...]:
        """A command line with secret values masked: `--token X`, `--token=X`, `WANDB_API_KEY=X`, `logger.api_key=X`."""
        masked: list[str] = []
        value_is_secret = False
        for argument in argv:
            if value_is_secret and not argument.startswith("--"):
                masked.append(MASK)
                value_is_secret = False
                continue
            value_is_secret = argument.startswith("-") and "=" not in argument and is_secret_name(argument)
            name, equals, _ = argument.partition("=")
            whole = equals and re.fullmatch(r"[\w.+~-]+", name) and is_secret_name(name)  # not a URL with a query
            masked.append(f"{name}={MASK}" if whole else self.text(argument))
        return tuple(masked)

    @cached_property
    def _home(self) -> re.Pattern[str] | None:
        home = self.home.rstrip("/")
        return re.compile(r"(?<![\w.-])" + re.escape(home) + r"(?![\w.-])") if len(home) > 1 else None

    @cached_property
    def _user(self) -> re.Pattern[str] | None:
        # root is nobody's name, and /root is a home, which is replaced before this
        if len(self.user) < 2 or self.user == "root":
            return None
        user = re.escape(self.user)
        return re.compile(rf"(?<=/){user}(?=[/:'\"\s]|$)|(?<![\w.-]){user}(?=@)|(?<=user=){user}\b|(?<=user ){user}\b")

    @cached_property
    def _host(self) -> re.Pattern[str] | None:
        host = re.escape(self.host)
        if len(self.host) < 2 or self.host == "localhost":
            return None
        if self.host.lower() in _TRADE:
            return re.compile(rf"(?<=@){host}(?![\w-])")  # a machine called `gpu` must not spoil every name with gpu
        if not re.search(r"[\d.-]", self.host) and len(self.host) < 8:
            # a short one as a whole word (or before _pid, as trace files have it) that is no name of C++
            return re.compile(rf"(?<![\w:-]){host}(?=_\d)|(?<![\w:<-]){host}(?![\w<(-]|::)")
        return re.compile(rf"(?<![A-Za-z0-9-]){host}(?![A-Za-z0-9-])")  # trace files are called HOST_pid.time


_OTHER_HOMES = re.compile(r"((?:/home|/Users|[A-Z]:\\Users)[/\\])(?!USER\b)[^/\\\s:'\"]+")


def is_secret_name(name: str) -> bool:
    """Whether a value under this name must not be kept: `--hf-token`, `WANDB_API_KEY`, `db.password`."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip())  # apiKey
    words = [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]
    if not words:
        return False
    last, before = words[-1], set(words[:-1])
    if last == "token" and before & _MODEL_TOKENS:
        return False
    return last in _SECRET_WORDS or (last == "key" and bool(before & _KEY_KINDS))


def secret_values(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The values of variables with a secret's name, longest first; short ones (`1`, `true`) are left, they are words."""
    return tuple(
        sorted({v for k, v in variables.items() if len(v) >= 8 and is_secret_name(k)}, key=lambda v: (-len(v), v))
    )


def _mask_assignment(match: re.Match[str]) -> str:
    if not is_secret_name(match["name"]):
        return match[0]
    return f"{match['name']}{match['equals']}{MASK}"


def mask_command(argv: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """A command line as it may stand in a manifest (see Scrubber.command), for this machine's user."""
    return Scrubber.of_this_machine().command([os.fspath(argument) for argument in argv])
