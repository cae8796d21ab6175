"""`gguf-pp worker --check`: what a worker has, and how fast the way to it is."""

from contextlib import nullcontext
from pathlib import Path

from gguf_pp import fetch
from gguf_pp.gguf import ModelFile
from gguf_pp.gguf.identity import identity_of

from .session import print_json
from .tables import print_table, size


def what_is_lent(name: str, n_threads: int, kernels: str, unusable: str | None) -> str:
    """A device of a worker in a few words."""
    if unusable:
        return f"can be used no more: {unusable}"
    threads = "" if name.startswith("cuda") else f"{n_threads} threads, "
    return f"{threads}{kernels} kernels"


def check(
    address: str,
    model: str | None,
    secret_file: Path | None,
    tls_ca: Path | None,
    timeout_s: float,
    *,
    as_json: bool,
) -> None:
    """Print the report on a worker. Raises RemoteError if it cannot be had."""
    from gguf_pp.pipeline.lent import Access
    from gguf_pp.worker.check import look_at

    opened = nullcontext(None) if model is None else ModelFile.open(fetch.resolve(model))
    with opened as file:
        identity = None if file is None else identity_of(file)
    report = look_at(address, identity, Access(secret_file, tls_ca, timeout_s))
    if as_json:
        print_json(report.as_dict())
        return
    first, last = report.wire_versions
    spoken = f"{last}" if first == last else f"{first} to {last}"
    print(f"{report.address}: gguf-pp {report.version}, protocol {spoken}")
    secret = "a secret was proved both ways" if report.with_secret else "no secret"
    print(f"{secret}, {'encrypted' if report.encrypted else 'not encrypted'}")
    print(f"round trip {report.round_trip_s * 1e3:.2f} ms")
    rates = report.up_bytes_per_s / 1e6, report.down_bytes_per_s / 1e6
    print(f"bandwidth {rates[0]:.0f} MB/s there, {rates[1]:.0f} MB/s back")
    rows = [
        (
            device.name_there,
            what_is_lent(device.name_there, device.n_threads, device.kernels, device.unusable),
            size(device.total_bytes),
            size(device.free_bytes),
        )
        for device in report.devices
    ]
    print_table(("device", "what", "total", "free"), rows, n_left=2)
    if report.has_model is not None:
        where = {
            "model-dir": "it has the model in a --model-dir: no weights are sent",
            "cache": "it has weights of the model in its cache",
            "no": "it does not have the model: its layers are sent once",
        }
        print(where.get(report.has_model, report.has_model))
