"""Create or delete what cluster.yaml needs on AWS: one CloudFormation stack and the key pair."""

import os

import requests

from raymill import settings
from raymill.aws import (
    guard,
    images,
    key_pair,
    launcher_file,
    load_balancer,
    ownership,
    reservation,
    stack,
    stack_sections,
    vpc,
    zones,
)
from raymill.aws.deletion import attempt
from raymill.common import bucket, instances
from raymill.common.cluster_file import ClusterFile, target
from raymill.errors import UserError
from raymill.ray_support.aws_sections import NetworkSection


def prepare(file: ClusterFile) -> None:
    """Create or update the stack and the key pair, if necessary, and write the file for Ray's launcher.

    Raises:
        UserError: there is no suitable network, zone, bucket, image or private key, stack.yaml has another
            name, this machine's address is unknown, or AWS could not create the stack.
    """
    stack.check_name(file)
    stack.when_idle(file)  # what follows depends on how a running operation ends
    if problem := bucket.problem(file):
        raise UserError(problem)
    section = settings.load(NetworkSection, "network", profile="cluster")
    offers = zones.offered(file)
    network, efa_cards = vpc.find_network(file, section, offers), vpc.efa_cards(file, section)
    vpc.refuse_first_zone(file, section, network, offers)
    callers = section.callers or (f"{_own_address()}/32",)
    parameters = {
        **network.stack_parameters,
        "Private": "yes" if section.private else "no",
        "Efa": "yes" if efa_cards else "no",
        "Caller": callers[0],
        "BucketName": bucket.name(file),
        "MakeBucket": _make_bucket(file),
        **reservation.stack_parameters(file, section),
        **load_balancer.stack_parameters(section, network),
        **stack_sections.boundary_parameters(),
        **stack_sections.budget_parameters(),
    }
    _check_workers(file, parameters)
    running = instances.head(file)
    with_images = images.keep(file, running)
    key_pair.check(file)
    owner = ownership.record(file)  # only now, because everything before creates nothing
    launcher_file.write(with_images)
    key_pair.ensure(file, owner)
    result = stack.deploy(file, parameters, efa_cards, callers[1:], owner=owner)
    guard.prepare(file, running)
    bucket.add_lifecycle_rules(file)
    used = ", ".join(dict.fromkeys(network.zones))
    print(f"stack {file.slug} {result} in {used}; port 22 is open only to {', '.join(callers)}")
    print(f"bucket: s3://{bucket.name(file)}")
    print(f"image: {with_images.head.node_config['ImageId']}")
    if section.costs:
        print(section.costs)


def _check_workers(file: ClusterFile, parameters: dict[str, str]) -> None:
    """Raise `UserError` if the update deletes subnets or placement groups in which workers run.

    AWS would keep these, and they would belong to no stack, so that `down` could not delete the VPC.
    """
    now = stack.parameters(file)
    names = ["Efa"] if now.get("Vpc") else ["Efa", "Private", "ReservedZone"]
    leaving = [name for name in names if now.get(name, "no") not in ("no", "", parameters.get(name, ""))]
    workers = [one for one in instances.living(file) if one.node_type != file.head.name] if leaving else []
    if workers:
        settings_of = {"Efa": "efa", "Private": "private", "ReservedZone": "reservation"}
        raise UserError(
            f"{', '.join(settings_of[name] for name in leaving)} in settings.toml cannot change while workers run "
            f"({', '.join(one.id for one in workers)}). Wait until they have ended, or run: "
            f"inv down --target {target()}"
        )


def delete(file: ClusterFile) -> list[str]:
    """Delete the guard, the key pair and the stack, but not the bucket. Return what could not be deleted and why."""
    return [
        *attempt("the schedule of the guard", lambda: guard.delete(file)),
        *attempt(f"key pair {file.slug}", lambda: file.client("ec2").delete_key_pair(KeyName=file.slug)),
        *attempt(f"stack {file.slug}", lambda: stack.delete(file)),
    ]


def _own_address() -> str:
    """Return this machine's public address."""
    url = os.environ.get("CALLER_ADDRESS_URL", "https://checkip.amazonaws.com")  # the emulated AWS has its own URL
    try:
        response = requests.get(url, timeout=10)
        response.raise_for_status()
        return response.text.strip()
    except requests.RequestException as error:
        raise UserError(
            f"{url} did not return this machine's address ({error}). "
            'Set callers = ["a.b.c.d/32"] in [cluster.network] of settings.toml'
        ) from None


def _make_bucket(file: ClusterFile) -> str:
    """Return "yes" or "no" for the stack's parameter MakeBucket. An existing stack keeps its value.

    Return "no" for the user's bucket, and for one that an earlier stack left, because this stack cannot adopt it.
    """
    if bucket.users_own():
        return "no"
    if existing := stack.parameters(file):
        own = bucket.name(file)
        if existing.get("BucketName", own) == own:  # stacks of earlier versions lack this parameter
            return existing["MakeBucket"]
    return "no" if bucket.exists(file) else "yes"
