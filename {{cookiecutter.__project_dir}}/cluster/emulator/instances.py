"""The instances of the emulated cloud as its other parts see them: a plain view of what moto keeps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moto.ec2.models import ec2_backends

ACCOUNT = "123456789012"  # moto's


@dataclass(frozen=True)
class Instance:
    """One instance at this moment."""

    moto: Any
    """moto's own object."""
    id: str
    type: str
    market: str
    """"spot" or "on-demand"."""
    state: str
    zone: str
    region: str
    private_ip: str
    public_ip: str
    role: str | None
    """Name of the IAM role in its profile."""
    public_key: str
    user_data: bytes
    tags: dict[str, str]


def every() -> Iterator[Instance]:
    """All that were ever launched, in every region; those that have ended too."""
    for region, backend in list(ec2_backends[ACCOUNT].items()):
        profiles = {
            association.instance.id: association.iam_instance_profile
            for association in list(backend.iam_instance_profile_associations.values())
        }
        for reservation in list(backend.reservations.values()):
            for instance in list(reservation.instances):
                profile = profiles.get(instance.id)
                key = backend.key_pairs.get(instance.key_name or "")
                yield Instance(
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


def give_all_their_profile(name: str) -> None:
    """Give the instance profile of a launch to all of its instances; moto gives it to the first alone."""
    for backend in list(ec2_backends[ACCOUNT].values()):
        for reservation in list(backend.reservations.values()):
            with_profile = backend.iam_instance_profile_associations
            for instance in reservation.instances[1:]:
                if reservation.instances[0].id in with_profile and instance.id not in with_profile:
                    backend.associate_iam_instance_profile(instance.id, iam_instance_profile_name=name)


def running_at(address: str) -> Instance | None:
    """The running instance that has `address`, private or public."""
    return next(
        (one for one in every() if one.state == "running" and address in (one.private_ip, one.public_ip)),
        None,
    )
