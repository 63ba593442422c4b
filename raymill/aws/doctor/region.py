"""Check the role for spot instances, the bucket, the key for disks, and the region's zones, images and prices."""

from collections.abc import Iterator
from typing import Any

from botocore.exceptions import ClientError

from raymill import settings
from raymill.aws import images, vpc, zones
from raymill.aws.doctor.account import Account, alternatives
from raymill.common import bucket, gpu_types, prices
from raymill.doctor import Finding, judge
from raymill.ray_support.aws_sections import NetworkSection

FIRST_DRIVER_580 = "2025-08-04"
"""Date of the first release of NVIDIA's driver 580 for data centers (580.65.06)."""

MANAGED_KEY = "alias/aws/ebs"


def check_spot_role(account: Account) -> Iterator[Finding]:
    """Check for the role that spot instances need.

    An account that has never used spot instances lacks this role, and the head may not create it.
    """
    if all(worker.market != "spot" for worker in account.workers):
        return
    iam = account.client("iam")
    try:
        iam.get_role(RoleName="AWSServiceRoleForEC2Spot")
    except iam.exceptions.NoSuchEntityException:
        remedy = "Run once: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
        yield Finding("error", f"this account lacks the role for spot instances. {remedy}")
    else:
        yield Finding("ok", "this account has the role for spot instances")


def check_bucket(account: Account) -> Iterator[Finding]:
    """Check that the cluster can use the user's bucket, if there is one."""
    if problem := bucket.problem(account):
        yield Finding("error", problem)
    elif bucket.users_own():
        yield Finding("ok", f"your bucket {bucket.users_own()} is in {account.region}")


def check_zones(account: Account) -> Iterator[Finding]:
    """Check that the region offers every instance type of the cluster.

    A GPU type that it does not offer is only a warning if another type can do the same work.
    """
    node_types = {one.instance_type: one for one in (account.head, *account.workers)}
    offers = zones.offered(account)
    offered = {name for name, found in offers.items() if found}
    for instance_type, found in sorted(offers.items()):
        text = f"{instance_type} is offered in {', '.join(sorted(found)) or f'no zone of {account.region}'}"
        others = {one.instance_type for one in alternatives(account, node_types[instance_type])} & offered
        yield judge(
            bool(found),
            text,
            "Set another InstanceType or region in cluster/cluster.yaml",
            "warning" if others else "error",
        )


def check_network(account: Account) -> Iterator[Finding]:
    """Check that the zones offer what starts there, and that the user's subnets have free addresses and a route."""
    section = settings.load(NetworkSection, "network", profile="cluster")
    yield from _check_efa(account, section)
    offers = zones.offered(account)
    network = vpc.find_network(account, section, offers)
    for node_type, problem in vpc.unoffered(account, section, network, offers):
        if offers[node_type.instance_type]:  # otherwise, check_zones has said so
            others = {one.instance_type for one in alternatives(account, node_type)} - {node_type.instance_type}
            yield Finding("warning" if others else "error", problem)
    if network.zones[0] not in offers[zones.gpu_type(account)]:
        text = f"the head and CPU workers start in {network.zones[0]}, which does not offer {zones.gpu_type(account)}"
        yield Finding("warning", f"{text}. AWS charges about 0.02 dollars per GB between zones")
    if not section.subnets:
        yield Finding("ok", f"the stack makes a VPC with subnets in {', '.join(dict.fromkeys(network.zones))}")
        return
    subnets = account.client("ec2").describe_subnets(SubnetIds=sorted({network.head_subnet, *network.subnets}))
    for subnet in sorted(subnets["Subnets"], key=lambda subnet: subnet["AvailabilityZone"]):
        yield _check_room(account, subnet)
        route = vpc.default_route(account, subnet)
        if subnet["SubnetId"] == network.head_subnet or not section.private:
            is_right, what = route.startswith("igw-"), "public"
        else:
            is_right, what = bool(route) and not route.startswith("igw-"), "private"
        yield judge(
            is_right,
            f"subnet {subnet['SubnetId']}: internet traffic goes to {route or 'nowhere'}",
            f"It must be a {what} subnet, with a route to {'an internet' if what == 'public' else 'a NAT'} gateway, "
            "because instances download packages. Set another in [cluster.network] of settings.toml",
        )


def _check_efa(account: Account, section: NetworkSection) -> Iterator[Finding]:
    """Warn if a type without EFA keeps the other types from using it (see `vpc.efa_cards`)."""
    types = gpu_types.for_training(account)
    without = [one.name for one in types if not one.efa_cards]
    if section.efa and account.max_workers > 1 and 0 < len(without) < len(types):
        others = ", ".join(one.name for one in types if one.efa_cards)
        yield Finding(
            "warning",
            f"{', '.join(without)} has no EFA, so {others} does not use it either, and refuses to train on several "
            "machines. Use only types with EFA in [cluster.gpu], or set efa = false in [cluster.network] of "
            "settings.toml",
        )


def _check_room(account: Account, subnet: dict[str, Any]) -> Finding:
    """Check that a subnet has free addresses for the head and all workers, which may all start in one zone."""
    free, zone, needed = subnet["AvailableIpAddressCount"], subnet["AvailabilityZone"], account.max_workers + 1
    return judge(
        free >= needed,
        f"subnet {subnet['SubnetId']} in {zone}: {free} addresses free, up to {needed} needed",
        "Change subnets in [cluster.network] of settings.toml, or create a larger subnet: aws ec2 create-subnet "
        f"--vpc-id {subnet['VpcId']} --availability-zone {zone} --cidr-block A.B.C.D/24 --region {account.region}",
    )


def check_images(account: Account) -> Iterator[Finding]:
    """Check that every image exists, and that it is new enough to contain the driver that CUDA 13 needs."""
    for image in sorted({one.node_config.get("ImageId", "") for one in (account.head, *account.workers)} - {""}):
        if image.startswith(images.PARAMETER):
            ids = [latest] if (latest := images.latest(account, image)) else []
            browse = "aws ssm get-parameters-by-path --recursive --path /aws/service/deeplearning/ami"
        else:
            ids = [image]
            browse = "aws ec2 describe-images --owners amazon"
        only = [{"Name": "image-id", "Values": ids}]
        found = account.client("ec2").describe_images(Filters=only)["Images"] if ids else []
        remedy = f"Set another image in cluster/cluster.yaml. List images: {browse} --region {account.region}"
        text = f"ImageId {image} is {found[0]['ImageId'] if found else 'not an image'} in {account.region}"
        yield judge(bool(found), text, remedy)
        if found and found[0]["CreationDate"] < FIRST_DRIVER_580:
            created = found[0]["CreationDate"][:10]
            text = f"image {found[0]['ImageId']} is from {created}, before NVIDIA's driver 580, which CUDA 13 needs"
            yield Finding("error", f"{text}. {remedy}")


def check_disk_key(account: Account) -> Iterator[Finding]:
    """Check that the caller can use the account's own key for disks, if there is one.

    Otherwise EC2 would end each instance during its launch, with no reason but "Client error on launch".
    """
    key = account.client("ec2").get_ebs_default_kms_key_id()["KmsKeyId"]
    if key.endswith(MANAGED_KEY):
        yield Finding("ok", "AWS's own key encrypts the disks")
        return
    remedy = f"Show the key: aws kms describe-key --key-id {key} --region {account.region}"
    kms = account.client("kms")
    try:
        state = kms.describe_key(KeyId=key)["KeyMetadata"]["KeyState"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "AccessDeniedException":
            raise
        needed = "kms:CreateGrant kms:Decrypt kms:DescribeKey kms:GenerateDataKeyWithoutPlaintext kms:ReEncrypt*"
        text = f"your account encrypts disks with {key}, which you may not use. Ask for the permissions {needed}"
        yield Finding("error", f"{text}. {remedy}")
    else:
        yield judge(state == "Enabled", f"your account encrypts disks with {key}, in state {state}", remedy)


def check_prices(account: Account) -> Iterator[Finding]:
    """Report the prices of an idle cluster and of a full cluster."""
    known = prices.ask(account)
    idle = f"{known.head:.2f} dollars per hour while idle (the head, without disks and traffic)"
    yield Finding("ok", f"{idle}, {24 * known.maximum:.0f} dollars per day with all {account.max_workers} workers")
