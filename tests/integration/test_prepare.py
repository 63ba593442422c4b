"""Test `inv prepare` on the emulated AWS, and capacity reservations: buying, launching, and what the verbs say."""

import dataclasses
import datetime
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import emulated_aws
import pytest
from botocore.exceptions import ClientError
from emulated_aws import FILE, NOW, WANTED, edited, in_region, launch_head
from moto.iam.models import iam_backends
from rich.console import Console
from sleeping import in_this_thread

from raymill import settings
from raymill.aws import (
    capacity,
    capacity_blocks,
    cloud_status,
    guard,
    images,
    launcher_file,
    node_reports,
    prepare,
    quotas,
    reservation,
    stack,
    teardown,
    vpc,
)
from raymill.aws import target as aws_target
from raymill.aws.doctor import quotas as doctor_quotas
from raymill.aws.doctor import reserved
from raymill.aws.doctor.account import Account
from raymill.aws.node_reports import NodeReport
from raymill.aws.target import Aws
from raymill.common import bucket, cluster_file, instances, prices
from raymill.emulator import iam, moto_instances, stubs
from raymill.emulator.api import Api
from raymill.emulator.consistency import Consistency
from raymill.emulator.moto_instances import ACCOUNT, IMAGE
from raymill.emulator.schedules import Schedules
from raymill.errors import UserError
from raymill.instance_types import INSTANCE_TYPES, highest_price
from raymill.node import spending as node_spending
from raymill.node import state as node_state
from raymill.node import watchdog_head
from raymill.node.spending import Spending
from raymill.ray_support.aws_sections import NetworkSection
from raymill.ray_support.private import cluster_launcher

server, aws, assign = emulated_aws.server, emulated_aws.aws, emulated_aws.assign

GPU_TYPE = FILE.workers[-1].instance_type
ZONE = f"{FILE.region}b"
HOUR = 3600.0
DAY = datetime.timedelta(days=1)
NEWER_IMAGE = "ami-1e749f67"  # a later one
QUIET: dict[str, Any] = {"watchdog": {"runs": True}, "autoscaler": 1, "at": 0.0, "session": "session_1"}
QUIET |= {name: [] for name in ("nodes", "pending", "demands", "refused", "failed_setups")}
"""The status of a head on which nothing happens."""


def block(aws: Api, assign: Callable[[str, str], None], start_s: float, end_s: float, **values: Any) -> None:
    """Create or move the Capacity Block cr-1, and set it in settings.toml."""
    fields: dict[str, Any] = {"zone": ZONE, "instance_type": GPU_TYPE, "count": 2}
    aws.reservations.put("cr-1", start_s=start_s, end_s=end_s, **fields | values)
    assign("cluster.capacity", 'reservation = "cr-1"')


def launch(count: int = 1, **changes: Any) -> list[Any]:
    """Launch instances of the reserved node type. Like Ray's autoscaler, merge the launch template."""
    file = launcher_file.load()
    (worker,) = [one for one in file.workers if one.name == launcher_file.RESERVED]
    config = worker.node_config | {"ImageId": IMAGE} | changes
    template = config["LaunchTemplate"]
    versions = file.client("ec2").describe_launch_template_versions(
        LaunchTemplateName=template["LaunchTemplateName"], Versions=[template["Version"]]
    )["LaunchTemplateVersions"]
    config |= versions[0]["LaunchTemplateData"]
    return file.client("ec2").run_instances(**config, MinCount=count, MaxCount=count)["Instances"]


def refusal(**changes: Any) -> str:
    """Return EC2's error code for a launch that it rejects."""
    with pytest.raises(ClientError) as caught:
        launch(**changes)
    return caught.value.response["Error"]["Code"]


# ---------------------------------------------------------------- image and region


def admitted() -> set[str]:
    """Return the addresses that may connect to port 22."""
    filters = [{"Name": "group-name", "Values": [FILE.slug]}]
    (group,) = FILE.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
    rules = [rule for rule in group["IpPermissions"] if rule.get("FromPort") == 22]
    return {addresses["CidrIp"] for rule in rules for addresses in rule["IpRanges"]}


def test_the_addresses_of_several_people_are_admitted(aws: Api, assign: Callable[[str, str], None]) -> None:
    prepare.prepare(FILE)
    assert admitted() == {"203.0.113.7/32"}
    assign("cluster.network", 'callers = ["203.0.113.7/32", "198.51.100.0/28"]')
    prepare.prepare(FILE)
    assert admitted() == {"203.0.113.7/32", "198.51.100.0/28"}
    assign("cluster.network", 'callers = ["198.51.100.0/28"]')
    prepare.prepare(FILE)
    assert admitted() == {"198.51.100.0/28"}


def written_images() -> set[str]:
    """Return the images in the file that Ray's launcher reads."""
    file = cluster_file.load(launcher_file.FILE)
    return {one.node_config["ImageId"] for one in (file.head, *file.workers)}


def test_a_cluster_keeps_the_image_of_its_head(aws: Api) -> None:
    prepare.prepare(FILE)
    assert written_images() == {IMAGE}
    head = launch_head(cluster_file.load(launcher_file.FILE))
    moto_instances.publish_image(FILE.region, NEWER_IMAGE)
    prepare.prepare(FILE)
    assert written_images() == {IMAGE}
    assert images.keep(FILE, instances.head(FILE)).content == cluster_file.load(launcher_file.FILE).content
    chosen = edited({images.PARAMETER + moto_instances.IMAGE_PARAMETER: NEWER_IMAGE})
    assert images.keep(chosen, instances.head(FILE)).head.node_config["ImageId"] == NEWER_IMAGE
    instances.terminate(FILE, [head])
    prepare.prepare(FILE)
    assert written_images() == {NEWER_IMAGE}


def test_a_region_without_the_image_is_an_error(aws: Api) -> None:
    with pytest.raises(UserError, match="AWS has no parameter /aws/service/"):
        prepare.prepare(in_region("eu-west-1"))


def test_two_regions_can_have_the_same_cluster(aws: Api) -> None:
    """Two people of a team may use the project in two regions of one account."""
    moto_instances.publish_image("us-west-2", IMAGE)
    prepare.prepare(FILE)
    prepare.prepare(in_region("us-west-2"))
    assert FILE.client("iam").get_role(RoleName=in_region("us-west-2").role("head"))


# ---------------------------------------------------------------- zones


@pytest.fixture
def remove(aws: Api) -> Iterator[Callable[[str, str], None]]:
    """Yield a function that lets zones, given by their letters, no longer offer an instance type."""
    aws.faults.not_offered = []

    def remove(instance_type: str, letters: str) -> None:
        aws.faults.not_offered += [{"type": instance_type, "zone": f"{FILE.region}{letter}"} for letter in letters]

    yield remove
    aws.faults.not_offered = []


def zones_of_launches(aws: Api) -> str:
    """Start the head, a CPU worker and a GPU worker in each zone. Return the letters of their zones, "-" if refused."""
    file = cluster_file.load(launcher_file.FILE)
    launch_head(file)
    types = ("cpu", "gpu-spot-1", "gpu-spot-2", "gpu-spot-3")
    refused = ["Unsupported" in _launch_error(name) for name in types]
    started = [one.zone[-1] for one in moto_instances.list_all()]
    return started.pop(0) + "".join("-" if one else started.pop(0) for one in refused)


@pytest.mark.parametrize(
    ("head", "cpu", "expected"),
    [
        ("a", "b", "cccab"),  # spot prices rise from zone a to zone d
        ("abcd", "", "ff-ab"),  # only zone f has the head's type, and no GPUs
    ],
)
def test_the_head_starts_in_a_zone_that_offers_its_type(
    aws: Api, remove: Callable[[str, str], None], head: str, cpu: str, expected: str
) -> None:
    remove(FILE.head.instance_type, head)
    remove("m6i.8xlarge", cpu)
    prepare.prepare(FILE)
    assert zones_of_launches(aws) == expected


def test_a_stack_is_not_made_where_the_head_cannot_start(aws: Api, remove: Callable[[str, str], None]) -> None:
    prepare.prepare(FILE)
    remove(FILE.head.instance_type, "a")  # as in a stack of an earlier version, or after a change of InstanceType
    with pytest.raises(UserError, match=r"m6i.2xlarge \(head\) would start in us-east-1a, but only .* inv down"):
        prepare.prepare(FILE)
    prepare.delete(FILE)
    prepare.prepare(FILE)
    assert zones_of_launches(aws)[0] == "b"
    teardown.end_instances(FILE)
    prepare.delete(FILE)
    remove(FILE.head.instance_type, "bcdef")
    with pytest.raises(UserError, match=r"would start in us-east-1a, but no zone of us-east-1 offers it"):
        prepare.prepare(FILE)
    assert stack.find(FILE) is None


def test_the_stack_uses_no_local_zone(aws: Api) -> None:
    """EC2 lists them with the others, and CloudFormation could not create the stack."""
    rare = edited({"&gpu_instance_type p4d.24xlarge": "&gpu_instance_type p4de.24xlarge"})
    prepare.prepare(rare)  # two zones offer this type
    parameters = (stack.find(rare) or {})["Parameters"]
    assert [one["ParameterValue"][-1] for one in parameters if one["ParameterKey"].startswith("Zone")] == list("bcb")


def test_your_first_subnet_may_be_in_a_zone_without_the_heads_type(
    aws: Api, remove: Callable[[str, str], None], assign: Callable[[str, str], None]
) -> None:
    subnets = {one["AvailabilityZone"][-1]: one["SubnetId"] for one in FILE.client("ec2").describe_subnets()["Subnets"]}
    remove(FILE.head.instance_type, "a")
    assign("cluster.network", f'subnets = ["{subnets["a"]}", "{subnets["c"]}"]')
    prepare.prepare(FILE)
    assert zones_of_launches(aws) == "cccac"
    teardown.end_instances(FILE)
    prepare.delete(FILE)
    assign("cluster.network", f'head_subnet = "{subnets["a"]}"')
    with pytest.raises(UserError, match=r"\(head\) would start in us-east-1a, .* name a subnet in such a zone"):
        prepare.prepare(FILE)


# ---------------------------------------------------------------- bucket


def may_write_to(name: str) -> bool:
    """Return whether the workers' role may write objects to this bucket, which somebody's key encrypts."""
    role = iam_backends[ACCOUNT]["aws"].get_role(FILE.role("worker"))
    statements = [statement for policy in role.policies.values() for statement in iam.statements_of(policy)]
    key = f"arn:aws:kms:{FILE.region}:111122223333:key/1"
    needed = [
        iam.Permission("s3:ListBucket", f"arn:aws:s3:::{name}", {}),
        iam.Permission("s3:PutObject", f"arn:aws:s3:::{name}/runs/a", {}),
        iam.Permission("kms:GenerateDataKey", key, {"kms:ViaService": f"s3.{FILE.region}.amazonaws.com"}),
    ]
    return all(iam.is_allowed(statements, one) for one in needed)


def test_the_users_bucket_is_used_and_not_changed(aws: Api, assign: Callable[[str, str], None]) -> None:
    s3, made = FILE.client("s3"), bucket.name(FILE)
    if bucket.exists(FILE):  # from another test
        boto3.resource("s3", region_name=FILE.region).Bucket(made).objects.delete()
        s3.delete_bucket(Bucket=made)
    prepare.prepare(FILE)
    assert may_write_to(made)
    s3.create_bucket(Bucket="our-work")
    assign("cluster.storage", 'bucket = "our-work"')
    prepare.prepare(FILE)
    assert bucket.name(FILE) == "our-work"
    assert may_write_to("our-work")
    assert not may_write_to(made)
    with pytest.raises(ClientError, match="NoSuchLifecycleConfiguration"):
        s3.get_bucket_lifecycle_configuration(Bucket="our-work")
    assert s3.head_bucket(Bucket=made), "the bucket with the earlier work is kept"
    assign("cluster.storage", 'bucket = ""')
    prepare.prepare(FILE)
    assert may_write_to(made)
    assert not may_write_to("our-work")


def test_a_bucket_that_the_cluster_cannot_use_is_an_error(aws: Api, assign: Callable[[str, str], None]) -> None:
    assign("cluster.storage", 'bucket = "s3://our-work/llm"')
    with pytest.raises(UserError, match="Write it without s3://"):
        prepare.prepare(FILE)
    assign("cluster.storage", 'bucket = "nobodys-work"')
    with pytest.raises(UserError, match=r"does not exist\. Run: aws s3 mb s3://nobodys-work --"):
        prepare.prepare(FILE)
    far = boto3.client("s3", region_name="eu-west-1")
    far.create_bucket(Bucket="far-work", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    assign("cluster.storage", 'bucket = "far-work"')
    with pytest.raises(UserError, match="is in eu-west-1, but the cluster is in us-east-1"):
        prepare.prepare(FILE)
    assert stack.find(FILE) is None, "nothing is created"


# ---------------------------------------------------------------- reservations


def test_a_quota_is_enforced_in_its_market(aws: Api) -> None:
    """The emulator refuses launches beyond a quota as EC2 does, and jobs are offered only what the quotas allow."""
    prepare.prepare(launcher_file.load())
    spot = quotas.of(GPU_TYPE, "spot")
    assert spot
    aws.faults.quotas = {spot.code: INSTANCE_TYPES[GPU_TYPE].vcpus - 1.0}
    try:
        assert {offer["labels"]["market"] for offer in capacity.offers(FILE)} == {"on-demand"}
        assert "MaxSpotInstanceCountExceeded" in _launch_error("gpu-spot-1")
        assert _launch_error("gpu-on-demand-1") == ""
        aws.faults.quotas = {spot.code: float(INSTANCE_TYPES[GPU_TYPE].vcpus)}
        assert _launch_error("gpu-spot-1") == ""
        assert "MaxSpotInstanceCountExceeded" in _launch_error("gpu-spot-1")  # the first one still runs
        on_demand = quotas.of(GPU_TYPE, "on-demand")
        assert on_demand
        aws.faults.quotas = {on_demand.code: 0.0}
        assert "VcpuLimitExceeded" in _launch_error("gpu-on-demand-1")
    finally:
        aws.faults.quotas = {}


def test_the_doctor_names_each_quota_that_a_new_account_lacks(aws: Api) -> None:
    aws.faults.quotas = {**stubs.NEW_ACCOUNT, "L-F678F1CE": None}
    file = launcher_file.load()
    clients = {name: FILE.client(name) for name in ("ec2", "service-quotas", "cloudformation")}
    try:
        found = list(doctor_quotas.check(Account(file.content, file.digest, "arn", clients)))
    finally:
        aws.faults.quotas = {}
    errors = [one.text.partition(" needed")[0] for one in found if one.status == "error"]
    needs = (("L-417A185B", 192), ("L-7212CCBC", 192), ("L-1216C47A", 72))  # on demand, spot, head and CPU workers
    assert errors == [f"Running machines ({code}): {vcpus} vCPUs" for code, vcpus in needs]
    (warning,) = [one.text for one in found if one.status == "warning"]
    assert "quotas L-F678F1CE: not checked, because AWS says: " in warning
    assert "NoSuchResourceException" in warning
    (disks,) = [one.text for one in found if one.status == "ok"]
    assert "(L-7A658B76): 1.5 TiB needed, 50 granted, 0.0 used by other disks" in disks


def _launch_error(node_type: str) -> str:
    """Launch an instance of a node type. Return EC2's error, or "" if it starts."""
    (worker,) = [one for one in FILE.workers if one.name == node_type]
    config = worker.node_config | {"ImageId": IMAGE}
    template = config.pop("LaunchTemplate")
    versions = FILE.client("ec2").describe_launch_template_versions(
        LaunchTemplateName=template["LaunchTemplateName"], Versions=[template["Version"]]
    )["LaunchTemplateVersions"]
    try:
        FILE.client("ec2").run_instances(**config, **versions[0]["LaunchTemplateData"], MinCount=1, MaxCount=1)
    except ClientError as error:
        return str(error)
    return ""


def test_buying_a_block_writes_its_id_to_the_settings(aws: Api, capsys: pytest.CaptureFixture[str]) -> None:
    before = settings.FILE.read_text(encoding="utf-8")
    capacity_blocks.show(FILE, WANTED, Console(width=200))
    shown = capsys.readouterr().out
    offering, *_ = re.findall(r"cb-\w+", shown)
    assert f"Capacity Blocks of 2 × {GPU_TYPE}" in shown
    assert "844.80 USD" in shown  # 2 instances for 24 hours at 80 % of 22 dollars
    assert "17.60 USD" in shown
    capacity_blocks.buy(FILE, offering, yes=True)
    bought = reservation.require(FILE)
    assert bought
    assert (bought.state, bought.is_block, bought.count) == ("scheduled", True, 2)
    tags = FILE.client("ec2").describe_capacity_reservations()["CapacityReservations"][0]["Tags"]
    assert tags == [{"Key": "ray-project", "Value": FILE.slug}]
    after = settings.FILE.read_text(encoding="utf-8")
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    (line,) = changed
    assert line.startswith(f'reservation = "{bought.id}"')
    assert line.endswith(before.partition('reservation = ""')[2].partition("\n")[0].strip())  # the comment
    with pytest.raises(ClientError, match="InvalidCapacityBlockOfferingIdNotFound"):  # sold
        capacity_blocks.buy(FILE, offering, yes=True)


def test_nothing_is_bought_without_consent(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity_blocks.show(FILE, WANTED, Console())
    offering = FILE.client("ec2").describe_capacity_block_offerings(
        InstanceType=GPU_TYPE, InstanceCount=2, CapacityDurationHours=24
    )["CapacityBlockOfferings"][0]["CapacityBlockOfferingId"]
    with pytest.raises(UserError, match="not an offering of the last search"):
        capacity_blocks.buy(FILE, offering, yes=True)
    saved = re.findall(r"cb-\w+", capacity_blocks.OFFERINGS.read_text())[0]
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(UserError, match=rf"inv capacity --target aws --buy {saved} --yes"):
        capacity_blocks.buy(FILE, saved, yes=False)
    assert FILE.client("ec2").describe_capacity_reservations()["CapacityReservations"] == []


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"days": 15}, "--days is 15. Use 1 to 14"),
        ({"earliest": "tomorrow"}, "--earliest is 'tomorrow', which is not a date"),
        ({"latest": f"{datetime.date.today()}"}, "AWS offers no such Capacity Block"),
    ],
)
def test_a_search_that_finds_nothing_says_why(aws: Api, wanted: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=re.escape(error)):
        capacity_blocks.show(FILE, dataclasses.replace(WANTED, **wanted), Console())


def test_prepare_makes_what_reserved_instances_need(aws: Api, assign: Callable[[str, str], None]) -> None:
    block(aws, assign, -HOUR, 24 * HOUR)
    file = launcher_file.load()
    prepare.prepare(file)
    written = cluster_file.load(launcher_file.FILE)
    assert written.content == images.keep(file, None).content
    cluster_launcher.validate(written.content)
    (machine,) = launch()
    assert machine["Placement"]["AvailabilityZone"] == ZONE
    (living,) = instances.living(file)
    assert (living.id, living.market) == (machine["InstanceId"], "capacity-block")


def statements_of_role(part: str) -> list[dict[str, Any]]:
    """Return the statements of all policies of a role."""
    client, role = FILE.client("iam"), FILE.role(part)
    names = client.list_role_policies(RoleName=role)["PolicyNames"]
    documents = [client.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"] for name in names]
    return [statement for document in documents for statement in document["Statement"]]


def test_the_head_may_launch_reserved_instances(aws: Api, assign: Callable[[str, str], None]) -> None:
    prepare.prepare(FILE)
    block(aws, assign, -HOUR, 24 * HOUR)
    prepare.prepare(launcher_file.load())
    launch()
    statements = statements_of_role("head")
    (call,) = [call for call in aws.calls if call.action == "RunInstances"]
    assert [one for one in call.permissions if not iam.is_allowed(statements, one)] == []
    assert any("capacity-reservation/cr-1" in one.resource for one in call.permissions)


def test_only_with_a_reservation_the_stack_has_a_template_for_it(aws: Api, assign: Callable[[str, str], None]) -> None:
    def templates() -> list[str]:
        found = FILE.client("ec2").describe_launch_templates()["LaunchTemplates"]
        return sorted(one["LaunchTemplateName"] for one in found)

    for _ in range(2):
        prepare.prepare(launcher_file.load())
    parts = ("cpu", "gpu-1", "gpu-2", "gpu-3", "head", "serve-1", "serve-2", "serve-3")
    others = [f"{FILE.slug}-{part}" for part in parts]
    assert templates() == others
    assert "gpu-reserved" not in launcher_file.FILE.read_text(encoding="utf-8")
    block(aws, assign, -HOUR, 24 * HOUR)
    prepare.prepare(launcher_file.load())
    assert templates() == sorted([*others, f"{FILE.slug}-reserved"])
    assert "gpu-reserved" in launcher_file.FILE.read_text(encoding="utf-8")
    assign("cluster.capacity", 'reservation = ""')
    prepare.prepare(launcher_file.load())
    kept = (stack.find(FILE) or {})["Parameters"]  # because instances of the block may still run
    assert {"ParameterKey": "ReservedZone", "ParameterValue": ZONE} in kept


def test_a_new_reservation_does_not_replace_the_head(aws: Api, assign: Callable[[str, str], None]) -> None:
    prepare.prepare(FILE)
    before = aws_target._launch_hash(FILE)
    block(aws, assign, -HOUR, 24 * HOUR)
    assert aws_target._launch_hash(launcher_file.load()) == before


def test_ec2_refuses_launches_that_the_block_does_not_allow(aws: Api, assign: Callable[[str, str], None]) -> None:
    block(aws, assign, -HOUR, 24 * HOUR)
    prepare.prepare(launcher_file.load())
    other_zone = {"LaunchTemplateName": f"{FILE.slug}-gpu-1", "Version": "$Latest"}
    assert refusal(LaunchTemplate=other_zone) == "ReservationCapacityExceeded"
    other_type = next(one for one in ("p4d.24xlarge", "p4de.24xlarge") if one != GPU_TYPE)
    assert refusal(InstanceType=other_type) == "ReservationCapacityExceeded"
    assert refusal(InstanceMarketOptions={"MarketType": "spot"}) == "InvalidParameterCombination"
    assert refusal(count=3) == "ReservationCapacityExceeded"
    first, _ = launch(2)
    assert refusal() == "ReservationCapacityExceeded"
    instances.terminate(FILE, [first["InstanceId"]])
    assert launch()
    block(aws, assign, HOUR, 24 * HOUR)
    assert refusal() == "InvalidCapacityReservationState.PendingActivation"


def test_aws_ends_the_instances_30_minutes_before_the_end(aws: Api, assign: Callable[[str, str], None]) -> None:
    block(aws, assign, -HOUR, 24 * HOUR)
    prepare.prepare(launcher_file.load())
    launch(2)
    block(aws, assign, -HOUR, 31 * 60)
    assert not any(aws.reservations.end(one) for one in moto_instances.list_all())
    block(aws, assign, -HOUR, 30 * 60)
    assert all(aws.reservations.end(one) for one in list(moto_instances.list_all()))
    assert instances.living(FILE) == []


def test_an_on_demand_reservation_has_no_window_and_costs_the_on_demand_price(
    aws: Api, assign: Callable[[str, str], None]
) -> None:
    block(aws, assign, -HOUR, 10 * 60, is_block=False)
    file = launcher_file.load()
    prepare.prepare(file)
    launch()
    (living,) = instances.living(file)
    assert living.market == "on-demand"
    assert not any(aws.reservations.end(one) for one in list(moto_instances.list_all()))
    assert prices.ask(file).workers[launcher_file.RESERVED] == 22.0


def test_jobs_start_although_aws_names_no_spot_prices(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices only order the zones."""
    prepare.prepare(FILE)
    offered = {offer["node_type"] for offer in capacity.offers(FILE)}
    monkeypatch.setattr(aws.faults, "prices", "UnauthorizedOperation")
    assert {offer["node_type"] for offer in capacity.offers(FILE)} == offered


def test_the_reserved_type_is_offered_first_and_is_prepaid(
    aws: Api, assign: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    block(aws, assign, -HOUR, 24 * HOUR)
    file = launcher_file.load()
    assert capacity.offers(file)[0] == {
        "node_type": "gpu-reserved",
        "labels": {"zone": "2", "market": "capacity-block"},
    }
    known = prices.ask(file)
    assert known.workers["gpu-reserved"] == 0
    assert known.maximum == prices.ask(FILE).maximum
    Console(width=200).print(prices.table(file, known))
    assert re.search(r"0 to 2 × \S+ +capacity-block +prepaid", capsys.readouterr().out)
    assert set(Aws().dollars_per_instance_hour().values()) == {11.0}  # spot; what is prepaid has no hourly price


def test_count_limits_the_reserved_instances(aws: Api, assign: Callable[[str, str], None]) -> None:
    block(aws, assign, -HOUR, 24 * HOUR)
    assign("cluster.capacity", "count = 1")
    assert capacity.possible_nodes(launcher_file.load())
    assert launcher_file.load().content["available_node_types"]["gpu-reserved"]["max_workers"] == 1


def findings() -> list[tuple[str, str]]:
    """Return the doctor's findings about the reservation: their status and text."""
    file = launcher_file.load()
    clients = {service: FILE.client(service) for service in ("ec2", "sts", "cloudformation")}
    return [(one.status, one.text) for one in reserved.check(Account(file.content, file.digest, "arn", clients))]


def test_the_doctor_accepts_a_running_block(aws: Api, assign: Callable[[str, str], None]) -> None:
    assert findings() == []
    block(aws, assign, -HOUR, 20 * HOUR)
    ((status, text),) = findings()
    assert status == "ok"
    assert re.fullmatch(rf"Capacity Block cr-1: 2 × {re.escape(GPU_TYPE)} in {ZONE} until \w+ \d+ \w+ \d\d:\d\d", text)


def test_the_doctor_warns_if_the_limit_in_hours_ends_a_block_early(
    aws: Api, assign: Callable[[str, str], None]
) -> None:
    block(aws, assign, -HOUR, 48 * HOUR)
    _, (status, text) = findings()
    assert status == "warning"
    assert text.startswith("the limit of 24 hours ends the cluster at")
    assert text.endswith("Set hours = 48 in [cluster.limits] of settings.toml")  # 47.5 hours are left
    assign("cluster.limits", "hours = 48")
    assert len(findings()) == 1


def test_the_doctor_warns_if_max_workers_leaves_reserved_instances_unused(
    aws: Api, assign: Callable[[str, str], None]
) -> None:
    block(aws, assign, -HOUR, 20 * HOUR, count=FILE.max_workers + 3)
    assert ("3 reserved instances idle. Raise max_workers") in findings()[1][1]


def paid_reservation(aws: Api, name: str, **values: Any) -> None:
    """Create an on-demand capacity reservation, or with `is_block` a Capacity Block, with the project's tag."""
    fields: dict[str, Any] = {"zone": ZONE, "instance_type": GPU_TYPE, "count": 2, "is_block": False}
    fields |= {"start_s": -HOUR, "end_s": None, "tags": {"ray-project": FILE.slug}}
    aws.reservations.put(name, **fields | values)


def test_a_reservation_that_goes_on_costing_is_named(
    aws: Api, assign: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """After `down`, in `up` and by the doctor, whether or not the settings still name it."""
    reservation.show_costs(FILE)
    assert capsys.readouterr().out == ""
    paid_reservation(aws, "cr-named", tags={})
    paid_reservation(aws, "cr-before")
    paid_reservation(aws, "cr-block", is_block=True, end_s=20 * HOUR, count=1)
    paid_reservation(aws, "cr-expired", end_s=-60)
    paid_reservation(aws, "cr-of-others", tags={"ray-project": "another"})
    paid_reservation(aws, "cr-without-tag", tags={})
    assign("cluster.capacity", 'reservation = "cr-named"')
    assign("cluster.capacity", "count = 1")  # the cluster may use one of two
    reservation.show_costs(FILE)
    shown = {re.findall(r"cr-[\w-]+", line)[0]: line for line in lines(capsys)}
    assert set(shown) == {"cr-named", "cr-before", "cr-block"}
    for name in ("cr-named", "cr-before"):
        assert (
            f"2 × {GPU_TYPE} in {ZONE} costs 44.00 dollars per hour until you cancel it, also while no" in shown[name]
        )
        cancel = "aws ec2 cancel-capacity-reservation --capacity-reservation-id"
        assert shown[name].endswith(f"To cancel it, run: {cancel} {name} --region {FILE.region}")
    assert shown["cr-block"].endswith("is paid in advance. AWS refunds nothing, and inv up can use it until its end")
    status = {
        re.findall(r"cr-[\w-]+", text)[0]: status for status, text in findings() if "costs" in text or "paid" in text
    }
    assert status == {"cr-named": "ok", "cr-before": "warning", "cr-block": "warning"}
    capsys.readouterr()
    assert Aws().down() == []
    assert [line for line in lines(capsys) if "cr-" in line] == list(shown.values())


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_without_permission_the_cost_of_reservations_is_not_known(aws: Api, capsys: pytest.CaptureFixture[str]) -> None:
    denied = (
        '{"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Action": "ec2:*Reservations", "Resource": "*"}]}'
    )
    iam_backends[ACCOUNT]["aws"].put_user_policy("laptop", "no-reservations", denied)
    reservation.show_costs(FILE)
    assert re.search(
        "costs money is not known: .* permission ec2:DescribeCapacityReservations", capsys.readouterr().out
    )


@pytest.mark.parametrize(("private", "gateway"), [("false", "igw-"), ("true", "nat-")])
def test_a_reservation_in_a_fourth_zone_gets_a_subnet_and_a_label(
    aws: Api, assign: Callable[[str, str], None], private: str, gateway: str
) -> None:
    assign("cluster.network", f"private = {private}")
    prepare.prepare(FILE)
    block(aws, assign, -HOUR, 20 * HOUR, zone=f"{FILE.region}d")
    file = launcher_file.load()
    assert capacity.offers(file)[0]["labels"]["zone"] == "reserved"
    prepare.prepare(file)
    (machine,) = launch()
    assert machine["Placement"]["AvailabilityZone"] == f"{FILE.region}d"
    assert machine["PrivateIpAddress"].startswith("10.0.243.")
    (instance,) = moto_instances.list_all()
    assert moto_instances.internet_gateway(instance).startswith(gateway)
    (call,) = [one for one in aws.calls if one.action == "RunInstances"]
    cards = [value for key, value in call.parameters.items() if key.endswith("NetworkCardIndex")]
    section = settings.load(NetworkSection, "network", profile="cluster")
    assert len(cards) == (vpc.efa_cards(file, section) or 1)


def test_reserved_instances_start_in_your_own_subnet(aws: Api, assign: Callable[[str, str], None]) -> None:
    block(aws, assign, -HOUR, 20 * HOUR)
    subnets = {one["AvailabilityZone"]: one["SubnetId"] for one in FILE.client("ec2").describe_subnets()["Subnets"]}
    here, elsewhere = subnets[ZONE], subnets[f"{FILE.region}a"]
    assign("cluster.network", f'subnets = ["{elsewhere}"]')
    with pytest.raises(UserError, match=rf"{elsewhere} is in {ZONE}, the zone of the Capacity Block cr-1. Add"):
        findings()
    assign("cluster.network", f'subnets = ["{elsewhere}", "{here}"]')
    prepare.prepare(launcher_file.load())
    (machine,) = launch()
    assert machine["SubnetId"] == here


@pytest.mark.parametrize(
    ("start_s", "end_s", "error"),
    [
        (
            HOUR,
            24 * HOUR,
            r"the Capacity Block cr-1 starts at .*, so nothing was started. .* inv up --target aws --wait",
        ),
        (-24 * HOUR, -HOUR, r"the Capacity Block cr-1 is expired, so no instance can start in it. Set another id"),
        (-24 * HOUR, 39 * 60, r"the Capacity Block cr-1 ends at .*, so no instance can start in it"),
    ],
)
def test_up_starts_nothing_before_or_after_the_block(
    aws: Api, assign: Callable[[str, str], None], start_s: float, end_s: float, error: str
) -> None:
    block(aws, assign, start_s, end_s)
    with pytest.raises(UserError, match=error):
        Aws().up(yes=True)
    assert not any(call.action in ("RunInstances", "CreateStack") for call in aws.calls)


def test_up_refuses_an_unknown_reservation(aws: Api, assign: Callable[[str, str], None]) -> None:
    assign("cluster.capacity", 'reservation = "cr-2"')
    with pytest.raises(UserError, match=f"there is no capacity reservation cr-2 in {FILE.region}. Set another"):
        Aws().up(yes=True)
    assert launcher_file.load().content == FILE.content


def test_up_can_wait_for_the_start(
    aws: Api, assign: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block(aws, assign, 2 * HOUR + 90, 24 * HOUR)
    waits: list[float] = []

    def pass_time(seconds: float) -> None:
        waits.append(seconds)
        block(aws, assign, -1, 24 * HOUR)

    monkeypatch.setattr(reservation.time, "sleep", in_this_thread(pass_time))
    reservation.wait_for_start(FILE)
    assert waits == [reservation.POLL_S]
    assert re.search(r"waiting for the Capacity Block cr-1: 2 × \S+ in \S+ from .* until", capsys.readouterr().out)


def test_a_block_that_has_not_started_has_its_size_in_a_tag(aws: Api, assign: Callable[[str, str], None]) -> None:
    """EC2 describes its capacity as 0 until then."""
    block(aws, assign, HOUR, 24 * HOUR, count=0, tags={reservation.QUANTITY_TAG: "4"})
    found = reservation.find(FILE)
    assert found
    assert found.count == 4


def test_status_says_when_the_block_ends_and_that_it_is_prepaid(aws: Api, assign: Callable[[str, str], None]) -> None:
    block(aws, assign, -HOUR, 24 * HOUR)
    file = launcher_file.load()
    prepare.prepare(file)
    launch(2)
    shown = cloud_status.cloud_status(file, QUIET)
    assert shown.notes[0].startswith("0.00 dollars per hour now")
    found = reservation.find(file)
    assert found
    assert shown.notes[1] == f"{found.summary}. Training saves a checkpoint at {reservation.local(found.drain)}"
    assert list(shown.tables[0].columns[-1].cells) == ["prepaid", "prepaid"]


# ---------------------------------------------------------------- what instances cost


def machine(market: str, zone: str, **changes: Any) -> instances.Instance:
    """Return a running instance, as EC2 describes it."""
    fields = {field.name: "" for field in dataclasses.fields(instances.Instance)}
    own = {"instance_type": GPU_TYPE, "market": market, "zone": f"{FILE.region}{zone}", "launched": NOW - DAY}
    return instances.Instance(**fields | own | changes)  # type: ignore[arg-type]


def test_an_instance_costs_the_price_of_its_own_zone_and_market(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    running = [
        machine("on-demand", "a", instance_type="m6i.2xlarge"),
        *(machine("spot", zone) for zone in "acc"),
        machine("on-demand", "c"),
        machine("capacity-block", "c", instance_type="only.prepaid"),
    ]
    per_hour = 0.4 + 22 * (0.5 + 2 * 0.66) + 22  # the spot price rises from zone to zone
    spending = Spending(FILE, {"dollars": 5.0})
    assert spending.add(running, 1800) == pytest.approx(per_hour)
    assert spending.dollars == pytest.approx(5.0 + per_hour / 2)
    shown = [dataclasses.replace(one, id=str(number), launched=NOW, tags={}) for number, one in enumerate(running)]
    monkeypatch.setattr(instances, "living", lambda file: shown)
    assert cloud_status.cloud_status(FILE, QUIET).notes[0].startswith(f"{per_hour:.2f} dollars per hour now")


def test_prices_are_read_again_every_hour(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    running, spending, clock = [machine("spot", "a")], Spending(FILE, {}), [100_000.0]
    monkeypatch.setattr(node_spending, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert spending.add(running, 5) == 11
    monkeypatch.setattr(stubs, "SPOT_PRICE_RATIO", 0.9)
    clock[0] += 3500
    assert spending.add(running, 5) == 11
    clock[0] += 200
    assert spending.add(running, 5) == pytest.approx(19.8)
    monkeypatch.setattr(aws.faults, "prices", "AccessDenied")  # for example, by an organization's policy
    clock[0] += 4000
    assert spending.add(running, 5) == pytest.approx(19.8)
    running.append(machine("on-demand", "b", instance_type="p4de.24xlarge"))
    assert spending.add(running, 5) == pytest.approx(19.8 + highest_price("p4de.24xlarge"))
    monkeypatch.setattr(aws.faults, "prices", "")
    assert spending.add(running, 5) == pytest.approx(19.8 + 28)


def test_status_names_prices_that_aws_does_not_name(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, `inv status` failed, and the limit counted 0 dollars."""
    monkeypatch.setattr(aws.faults, "prices", "AccessDenied")
    shown = [dataclasses.replace(machine("spot", "a"), id="i-1", tags={})]
    monkeypatch.setattr(instances, "living", lambda file: shown)
    spending = Spending(FILE, {})
    spending.add(shown, HOUR)
    watchdog = {"runs": True, "price_warning": spending.warning, **spending.state()}
    status = cloud_status.cloud_status(FILE, QUIET | {"watchdog": watchdog})
    highest = f"{highest_price(GPU_TYPE):.2f}"
    assert status.notes[0].startswith("0.00 dollars per hour now and the instances whose price is unknown, ")
    assert f"{highest} spent so far" in status.notes[0]
    (problem,) = status.problems
    assert f"does not name the price of {GPU_TYPE} (An error occurred (" in problem
    assert f"counts {GPU_TYPE} at {highest} dollars per hour until it does" in problem


def test_status_names_nodes_with_a_full_disk(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [
        dataclasses.replace(machine("spot", "a"), id=name, private_address=name, tags={}) for name in ("i-1", "i-2")
    ]
    monkeypatch.setattr(instances, "living", lambda file: shown)
    reports = {"i-1": NodeReport(0.0, [], "worker 1 has 1 GB free"), "i-2": NodeReport(0.0, [], "")}
    monkeypatch.setattr(node_reports, "read", lambda file, session: reports)
    nodes = [{"instance": name, "address": name} for name in reports]
    head_status = QUIET | {"nodes": nodes, "disk": "the head has 2 GB free"}
    assert cloud_status.cloud_status(FILE, head_status).problems == ["the head has 2 GB free", "worker 1 has 1 GB free"]


def test_an_instance_of_another_type_than_in_cluster_yaml_is_counted(aws: Api) -> None:
    """For example one that started before a change of InstanceType."""
    spending = Spending(FILE, {})
    spending.add([machine("on-demand", "a")], 0)
    assert spending.add([machine("on-demand", "a", instance_type="p4de.24xlarge")], 0) == 28


# ---------------------------------------------------------------- slow ends


def test_an_instance_that_takes_long_to_end_costs_nothing_and_down_waits_for_it(
    aws: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.prepare(FILE)
    head = launch_head(cluster_file.load(launcher_file.FILE))
    assert Spending(FILE, {}).add(instances.living(FILE), 0) > 0
    (moto,) = [one.moto for one in moto_instances.list_all() if one.id == head]
    moto._state.name, moto._state.code = "shutting-down", 32
    (ending,) = instances.living(FILE)
    assert Spending(FILE, {}).add([ending], HOUR) == 0
    with monkeypatch.context() as patch:
        patch.setattr(teardown, "TERMINATE_TIMEOUT_S", 1)
        with pytest.raises(UserError, match=f"not terminated after .* s: {head}"):
            teardown.end_instances(FILE)
    threading.Timer(3, moto.terminate).start()
    teardown.end_instances(FILE)
    assert instances.living(FILE) == []


def test_an_instance_that_ends_does_not_keep_a_closed_type_open(
    aws: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the autoscaler would replace it by one of the same type."""
    for name in ("LEASE", "LAUNCHED"):
        monkeypatch.setattr(watchdog_head, name, tmp_path / name)
    monkeypatch.setattr(node_state, "STATE_FILE", tmp_path / "watchdog.json")
    watchdog_head.LAUNCHED.touch()
    monkeypatch.setattr(watchdog_head.autoscaler_log, "LOGS", tmp_path)
    spot, written = "gpu-spot-1", []
    monkeypatch.setattr(watchdog_head, "write_limits", written.append)
    watchdog = watchdog_head.HeadWatchdog(FILE)
    watchdog._markets.closed_until[spot] = float("inf")
    for state in ("running", "shutting-down"):
        one = machine("spot", "a", node_type=spot, state=state)
        monkeypatch.setattr(instances, "living", lambda file, one=one: [one])
        watchdog.check()
    assert [limits[spot] for limits in written] == [1, 0]


# ---------------------------------------------------------------- the guard


def guarded_hours() -> float:
    """Return in how many hours the guard comes."""
    start = FILE.client("scheduler").get_schedule(Name=f"{FILE.slug}-guard")["StartDate"]
    return (start - datetime.datetime.now(datetime.UTC)).total_seconds() / HOUR


def test_the_guard_follows_the_limit(aws: Api, assign: Callable[[str, str], None]) -> None:
    assign("cluster.limits", "hours = 24")
    prepare.prepare(FILE)
    assert guarded_hours() == pytest.approx(24.25, abs=0.1)
    head = launch_head(cluster_file.load(launcher_file.FILE))
    launched = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=5)
    guard.move(FILE, launched, hours=48)
    assert guarded_hours() == pytest.approx(43.25, abs=0.1)
    prepare.prepare(FILE)  # keeps it, because the running cluster may have another limit than settings.toml
    assert guarded_hours() == pytest.approx(43.25, abs=0.1)
    guard.follow_head(FILE)
    assert guarded_hours() == pytest.approx(24.25, abs=0.1)
    guard.move(FILE, launched, hours=4)  # the end is past, so it comes now
    assert guarded_hours() == pytest.approx(0, abs=0.1)
    instances.terminate(FILE, [head])
    guard.prepare(FILE, instances.head(FILE))  # for a new cluster
    assert guarded_hours() == pytest.approx(24.25, abs=0.1)


def test_the_guard_ends_the_projects_instances_and_no_others(aws: Api, server: tuple[Api, str]) -> None:
    prepare.prepare(FILE)
    file = cluster_file.load(launcher_file.FILE)
    other, own = launch_head(file), launch_head(file)
    FILE.client("ec2").create_tags(Resources=[other], Tags=[{"Key": "ray-project", "Value": "another"}])
    schedules = Schedules(server[1])
    assert schedules.call_due() == []
    assert [one.id for one in instances.living(FILE)] == [own]
    guard.move(FILE, NOW - datetime.timedelta(hours=30), hours=24)
    assert schedules.call_due() == [f"{FILE.slug}-guard"]
    assert schedules.call_due() == []  # only in ten minutes again
    assert {one.id: one.state for one in moto_instances.list_all()} == {other: "running", own: "terminated"}
    # the role allows nothing else
    tag, any_instance = "aws:ResourceTag/ray-project", f"arn:aws:ec2:{FILE.region}:{ACCOUNT}:instance/i-1"
    statements = statements_of_role("guard")
    for value, allowed in ((FILE.slug, True), ("another", False)):
        permission = iam.Permission("ec2:TerminateInstances", any_instance, {tag: value})
        assert iam.is_allowed(statements, permission) == allowed
    assert {one["Action"] for one in statements} == {"ec2:DescribeInstances", "ec2:TerminateInstances"}
    # `down` removes the guard
    teardown.end_instances(FILE)
    assert "the schedule of the guard" in teardown.leftovers(FILE)
    assert f"role {FILE.role('guard')}" in teardown.leftovers(FILE)
    prepare.delete(FILE)
    assert teardown.leftovers(FILE) == []


def test_the_guard_waits_until_its_role_is_known(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    role = FILE.client("iam").create_role(RoleName="caller", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    outputs = {"Guard": f"arn:aws:lambda:{FILE.region}:{ACCOUNT}:function:guard", "GuardCaller": role}
    described = [{"OutputKey": key, "OutputValue": value} for key, value in outputs.items()]
    monkeypatch.setattr(stack, "find", lambda file: {"Outputs": described})
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    aws.consistency = Consistency(itertools.count(step=2.0).__next__)  # each call to AWS takes two seconds
    aws.consistency.check("CreateStack", {})
    guard.move(FILE, NOW, hours=24)
    calls = [call.error_code for call in aws.calls if call.action.startswith("POST /schedules/")]
    assert calls == ["Validation", ""]


def test_a_stack_without_a_guard_is_an_error(aws: Api) -> None:
    with pytest.raises(UserError, match=r"has no guard yet\. Run: inv prepare --target aws"):
        guard.move(FILE, NOW, hours=24)


# ---------------------------------------------------------------- what cannot change


def test_a_stack_stays_in_its_vpc(aws: Api, assign: Callable[[str, str], None]) -> None:
    prepare.prepare(FILE)
    default, *_ = (one["SubnetId"] for one in FILE.client("ec2").describe_subnets()["Subnets"])
    assign("cluster.network", f'subnets = ["{default}"]')
    with pytest.raises(UserError, match=r"is in a VPC of its own, and subnets .* To move it, run: inv down"):
        prepare.prepare(FILE)


def test_the_network_of_running_workers_stays(aws: Api, assign: Callable[[str, str], None]) -> None:
    block(aws, assign, -HOUR, 24 * HOUR)
    prepare.prepare(launcher_file.load())
    (worker,) = launch()
    tags = [{"Key": "ray-user-node-type", "Value": launcher_file.RESERVED}]
    FILE.client("ec2").create_tags(Resources=[worker["InstanceId"]], Tags=tags)
    assign("cluster.network", "efa = false")
    with pytest.raises(UserError, match=rf"efa in settings.toml cannot change .* \({worker['InstanceId']}\)"):
        prepare.prepare(launcher_file.load())


def test_a_change_set_that_nobody_executed_is_said(aws: Api) -> None:
    network = {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.0.0.0/16"}}
    FILE.client("cloudformation").create_change_set(
        StackName=FILE.slug,
        ChangeSetName="mine",
        ChangeSetType="CREATE",
        TemplateBody=json.dumps({"Resources": {"Network": network}}),
    )
    with pytest.raises(UserError, match=r"holds the name of the stack .* run: aws cloudformation delete-stack"):
        prepare.prepare(FILE)
