"""A view of moto's EC2 instances for the other parts of the emulator."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moto.ec2.models import ec2_backends

ACCOUNT = "123456789012"  # moto's default account


@dataclass(frozen=True)
class MotoInstance:
    """A snapshot of one instance's state."""

    moto: Any
    """moto's own object."""
    id: str
    type: str
    market: str
    """"spot", "on-demand" or "capacity-block"."""
    state: str
    zone: str
    region: str
    private_ip: str
    public_ip: str
    role: str | None
    """Name of the IAM role in its instance profile."""
    public_key: str
    user_data: bytes
    tags: dict[str, str]


def list_all() -> Iterator[MotoInstance]:
    """Yield every instance in every region, including terminated instances."""
    for region, backend in list(ec2_backends[ACCOUNT].items()):
        profiles = {
            association.instance.id: association.iam_instance_profile
            for association in list(backend.iam_instance_profile_associations.values())
        }
        for reservation in list(backend.reservations.values()):
            for instance in list(reservation.instances):
                profile = profiles.get(instance.id)
                key = backend.key_pairs.get(instance.key_name or "")
                yield MotoInstance(
                    moto=instance,
                    id=instance.id,
                    type=instance.instance_type,
                    market=instance.lifecycle or "on-demand",
                    state=instance.state,
                    zone=instance.placement.zone or "",
                    region=region,
                    private_ip=instance.private_ip or "",
                    public_ip=instance.public_ip or "",
                    role=profile.roles[0].name if profile and profile.roles else None,
                    public_key=key.material_public.decode() + "\n" if key else "",
                    user_data=instance.user_data.decode().encode() if instance.user_data else b"",
                    tags={tag["key"]: tag["value"] for tag in instance.get_tags()},
                )


def find_running(address: str) -> MotoInstance | None:
    """Return the running instance with this private or public address, or None."""
    return next(
        (one for one in list_all() if one.state == "running" and address in (one.private_ip, one.public_ip)),
        None,
    )


def attach_profile_to_all(name: str) -> None:
    """Attach a launch's instance profile to all of its instances. moto attaches it only to the first."""
    for backend in list(ec2_backends[ACCOUNT].values()):
        for reservation in list(backend.reservations.values()):
            with_profile = backend.iam_instance_profile_associations
            for instance in reservation.instances[1:]:
                if reservation.instances[0].id in with_profile and instance.id not in with_profile:
                    backend.associate_iam_instance_profile(instance.id, iam_instance_profile_name=name)
