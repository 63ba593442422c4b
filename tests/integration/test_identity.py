"""Test that verbs work only on the cluster of their checkout: its account, region and name, and its owner."""

import datetime
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import boto3
import emulated_aws
import pytest
from emulated_aws import ALLOW_ALL, FILE, IMAGE, NOW, WANTED, edited, in_region, launch_head
from moto.cloudformation.models import cloudformation_backends
from moto.iam.models import iam_backends

from raymill import drain
from raymill.aws import caller, identity, key_pair, launcher_file, ownership, prepare, secrets_manager, stack
from raymill.aws.caller import OWNER_TAG, Caller
from raymill.aws.doctor import owner as doctors_owner
from raymill.aws.doctor.account import Account
from raymill.aws.target import Aws
from raymill.common import bucket, cluster_file, instances
from raymill.common.cluster_file import ClusterFile
from raymill.emulator import moto_instances
from raymill.emulator.api import Api
from raymill.emulator.consistency import Consistency
from raymill.emulator.moto_instances import ACCOUNT, OTHER_ACCOUNT
from raymill.errors import UserError
from raymill.target import WantedBlock

server, aws, assign = emulated_aws.server, emulated_aws.aws, emulated_aws.assign

LAPTOP = f"arn:aws:iam::{ACCOUNT}:user/laptop"
COLLEAGUE = f"arn:aws:iam::{ACCOUNT}:user/colleague"
OTHER_REGION = "us-west-2"
CREATES = ("CreateStack", "UpdateStack", "DeleteStack", "ImportKeyPair", "DeleteKeyPair", "RunInstances")
CREATES += ("TerminateInstances", "CreateSecret", "DeleteSecret")
ARGUMENTS: dict[Any, Any] = {bool: True, str: "", int: 20, WantedBlock: WANTED, datetime.datetime: NOW}
ARGUMENTS |= {Mapping[str, str]: {}, Collection[str]: ()}
"""An argument for each type of the verbs' parameters."""
VERBS = [name for name in vars(Aws) if not name.startswith("_") and inspect.isfunction(vars(Aws)[name])]


@pytest.fixture
def sign_in(aws: Api, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that makes boto3 use the credentials of a user."""
    keys: dict[tuple[str, str], Any] = {}

    def sign_in(account: str, user: str) -> None:
        if (account, user) not in keys:
            users = iam_backends[account]["aws"]
            if user != "laptop" or account != ACCOUNT:
                users.create_user(FILE.region, user)
                users.put_user_policy(user, "all", ALLOW_ALL)
            keys[account, user] = users.create_access_key(user)
            moto_instances.publish_image(FILE.region, IMAGE, account)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys[account, user].access_key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys[account, user].secret_access_key)
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)

    return sign_in


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[ClusterFile], None]:
    """Return a function that makes the verbs read another cluster.yaml."""
    load = cluster_file.load
    return lambda file: monkeypatch.setattr(cluster_file, "load", lambda path=None: load(path) if path else file)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return a function that makes a terminal answer all questions. It returns the list of the questions to come."""

    def answer(text: str) -> list[str]:
        asked: list[str] = []
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or text)
        return asked

    return answer


def elsewhere() -> ClusterFile:
    """Return cluster.yaml for another region, in which clusters can start."""
    moto_instances.publish_image(OTHER_REGION, IMAGE)
    return in_region(OTHER_REGION)


def call(verb: str) -> Any:
    """Call a verb's method with some arguments."""
    method = getattr(Aws(), verb)
    return method(*[ARGUMENTS[one.annotation] for one in inspect.signature(method).parameters.values()])


def refusal(verb: str = "down") -> str:
    """Return the error with which a verb refuses. The doctor reports it as a finding."""
    if verb == "doctor":
        return next(one.text for one in Aws().doctor() if one.status == "error")
    with pytest.raises(UserError) as caught:
        call(verb)
    return str(caught.value)


def new_checkout() -> None:
    """Continue in another checkout, which has no record."""
    identity.record_file().unlink()


def owner() -> str | None:
    """Return the owner in the stack's tags."""
    tags = {tag["Key"]: tag["Value"] for tag in (stack.find(FILE) or {})["Tags"]}
    return tags.get(OWNER_TAG)


# ---------------------------------------------------------------- account, region and name


def test_every_verb_refuses_another_account_region_or_name(
    aws: Api, sign_in: Callable[[str, str], None], use: Callable[[ClusterFile], None]
) -> None:
    """Otherwise it would find nothing there, and say so, while the cluster costs money."""
    assert {"down", "doctor", "past_jobs", "key_stores"} < set(VERBS)
    identity.record(FILE, LAPTOP)
    aws.calls.clear()
    arn = f"arn:aws:iam::{OTHER_ACCOUNT}:user/laptop"
    for file, account, difference in (
        (in_region(OTHER_REGION), ACCOUNT, f"cluster/cluster.yaml has region: {OTHER_REGION}. Undo this change"),
        (edited({FILE.slug: "renamed"}), ACCOUNT, "cluster/cluster.yaml has cluster_name: renamed. Undo this change"),
        (FILE, OTHER_ACCOUNT, f"your AWS credentials are for account {OTHER_ACCOUNT}: {arn}. Use those of"),
    ):
        use(file)
        sign_in(account, "laptop")
        own = f"the cluster of this checkout is {FILE.slug} in account {ACCOUNT}, {FILE.region}, but {difference}"
        assert {verb: refusal(verb)[: len(own)] for verb in VERBS} == dict.fromkeys(VERBS, own)
    assert not [one for one in aws.calls if one.action in CREATES]


def test_down_ends_the_cluster_where_it_is(
    aws: Api,
    capsys: pytest.CaptureFixture[str],
    sign_in: Callable[[str, str], None],
    use: Callable[[ClusterFile], None],
) -> None:
    Aws().prepare()
    head = launch_head(cluster_file.load(launcher_file.FILE))
    assert json.loads(identity.record_file().read_text()) == {
        **{"account": ACCOUNT, "region": FILE.region, "slug": FILE.slug, "owner": LAPTOP},
    }
    use(in_region(OTHER_REGION))
    refusal()
    use(FILE)
    sign_in(OTHER_ACCOUNT, "laptop")
    refusal()
    sign_in(ACCOUNT, "laptop")
    assert [one.id for one in instances.living(FILE)] == [head]
    capsys.readouterr()
    assert Aws().down() == []
    assert f"stack of {FILE.slug} is left in account {ACCOUNT}, {FILE.region}\n" in capsys.readouterr().out
    assert not instances.living(FILE)
    assert not identity.record_file().exists()
    assert Aws().down() == []
    nothing = f"there was nothing to end: account {ACCOUNT} ({LAPTOP}) has nothing of {FILE.slug} in {FILE.region}"
    assert f"{nothing}, and no cluster in any region. " in capsys.readouterr().out
    use(elsewhere())
    Aws().prepare()  # a cluster that is gone does not bind the checkout
    assert identity.read() == identity.Identity(ACCOUNT, OTHER_REGION, FILE.slug, LAPTOP)


def test_the_two_accounts_and_regions_have_separate_clusters(
    aws: Api, sign_in: Callable[[str, str], None], use: Callable[[ClusterFile], None]
) -> None:
    """With its own checkout each. The emulator would otherwise mix them up, and hide what the verbs mix up."""
    places = [(ACCOUNT, FILE), (ACCOUNT, elsewhere()), (OTHER_ACCOUNT, FILE)]
    heads, secret = [], f"{FILE.slug}/HF_TOKEN"
    for account, file in places:
        sign_in(account, "laptop")
        identity.forget()
        use(file)
        assert not secrets_manager.names(file)
        Aws().prepare()
        file.client("secretsmanager").create_secret(Name=secret, SecretString=account)
        heads.append(launch_head(cluster_file.load(launcher_file.FILE)))
    for (account, file), head in zip(places, heads, strict=True):
        sign_in(account, "laptop")
        assert [one.id for one in instances.living(file)] == [head]
        assert secrets_manager.names(file) == ["HF_TOKEN"]
        assert file.client("secretsmanager").get_secret_value(SecretId=secret)["SecretString"] == account
        secrets_manager.delete(file)


def test_a_bucket_of_another_account_does_not_admit_the_caller(aws: Api, sign_in: Callable[[str, str], None]) -> None:
    boto3.client("s3", FILE.region).create_bucket(Bucket="of-the-first-account")
    sign_in(OTHER_ACCOUNT, "laptop")
    with pytest.raises(Exception, match=r"\(403\)"):
        boto3.client("s3", FILE.region).head_bucket(Bucket="of-the-first-account")


def test_a_late_list_of_secrets_is_that_of_the_account(aws: Api, sign_in: Callable[[str, str], None]) -> None:
    aws.consistency = Consistency(lambda: 0.0)
    client = FILE.client("secretsmanager")
    client.create_secret(Name=f"{FILE.slug}/LISTED", SecretString="1")
    assert client.list_secrets()["SecretList"]
    client.delete_secret(SecretId=f"{FILE.slug}/LISTED", ForceDeleteWithoutRecovery=True)
    assert client.list_secrets()["SecretList"], "the list is late"
    sign_in(OTHER_ACCOUNT, "laptop")
    assert not FILE.client("secretsmanager").list_secrets()["SecretList"]


def test_only_a_prepare_that_creates_something_binds_the_checkout(
    aws: Api, monkeypatch: pytest.MonkeyPatch, use: Callable[[ClusterFile], None]
) -> None:
    use(in_region("eu-west-1"))
    with pytest.raises(UserError, match="AWS has no parameter /aws/service/"):
        Aws().prepare()
    assert identity.read() is None
    use(FILE)
    with monkeypatch.context() as patch:
        patch.setattr(stack, "deploy", raising(UserError("no room")))
        assert refusal("prepare") == "no room"
    use(elsewhere())
    assert "Undo this change" in refusal("prepare")  # the key pair is still in the first region
    use(FILE)
    assert Aws().down() == []
    use(in_region(OTHER_REGION))
    Aws().prepare()


def raising(error: BaseException) -> Callable[..., None]:
    """Return a function that raises an error."""

    def function(*args: Any, **kwargs: Any) -> None:
        raise error

    return function


def test_what_down_leaves_binds_the_checkout(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    Aws().prepare()
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "delete", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            Aws().down()
    assert identity.read()
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "delete", lambda file: [])
        assert f"key pair {FILE.slug}" in Aws().down()
    assert identity.read()
    assert Aws().down() == []
    assert identity.read() is None


def test_without_a_record_down_names_the_clusters_of_the_account(
    aws: Api, capsys: pytest.CaptureFixture[str], use: Callable[[ClusterFile], None]
) -> None:
    """Who has lost the checkout may look in the wrong region."""
    Aws().prepare()
    new_checkout()
    use(in_region(OTHER_REGION))
    secrets_manager.delete(in_region(OTHER_REGION))  # those of other tests
    capsys.readouterr()
    assert Aws().down() == []
    said = f"has nothing of {FILE.slug} in {OTHER_REGION}, but it has {FILE.slug} in {FILE.region}. If one of them"
    assert said in capsys.readouterr().out
    policy = {"Effect": "Deny", "Action": "iam:ListRoles", "Resource": "*"}
    iam_backends[ACCOUNT]["aws"].put_user_policy(
        "laptop", "deny", json.dumps({"Version": "2012-10-17", "Statement": [policy]})
    )
    assert Aws().down() == []
    said = f"has nothing of {FILE.slug} in {OTHER_REGION}. Other regions were not searched: you lack"
    assert said in capsys.readouterr().out
    assert stack.find(FILE)


def test_a_damaged_record_is_never_ignored(aws: Api) -> None:
    for content in ("", '{"account": "123456789012"', '{"account": "1", "region": "us-east-1"}', "[]", "\0" * 80):
        identity.record_file().write_text(content)
        for verb in ("down", "past_jobs"):
            assert refusal(verb).startswith(f"{identity.record_file()} is damaged"), content


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (f'cluster_name: "{FILE.slug}"', 'cluster_name: "renamed"', rf"head .* tag ray-project: {FILE.slug}, but"),
        (f'Value: "{FILE.slug}"}}', 'Value: "renamed"}', "head .* tag ray-project: renamed, but cluster_name is"),
        ("{Key: ray-project,", "{Key: project,", "head .* has no tag ray-project, but cluster_name is"),
        ('region: "us-east-1"', 'region: "us-west-2"', "-us-east-1-head, but in us-west-2 its name is"),
    ],
)
def test_a_name_that_is_changed_in_one_place_is_an_error(old: str, new: str, error: str) -> None:
    """By these names, `down` finds what it ends."""
    with pytest.raises(UserError, match=error):
        identity.check(edited({old: new}))


def test_stack_yaml_has_the_name_of_the_cluster(aws: Api, use: Callable[[ClusterFile], None]) -> None:
    use(edited({FILE.slug: "renamed"}))
    with pytest.raises(UserError, match=rf"cluster/stack\.yaml has the tag ray-project: {FILE.slug}, but"):
        Aws().prepare()
    assert not identity.record_file().exists()


def test_no_bucket_is_not_the_same_as_no_work(
    aws: Api, assign: Callable[[str, str], None], sign_in: Callable[[str, str], None]
) -> None:
    """Without a record, another account looks like a project that has never run."""
    sign_in(OTHER_ACCOUNT, "stranger")
    name = f"{FILE.slug}-{OTHER_ACCOUNT}-{FILE.region}"
    s3 = boto3.resource("s3", region_name=FILE.region).Bucket(name)
    if bucket.exists(FILE):  # from another test
        s3.delete()
    for verb in ("past_jobs", "past_log", "access_logs", "storage_variables"):
        assert refusal(verb).startswith(f"there is no bucket s3://{name} that admits your AWS credentials, so")
    assign("cluster.storage", 'bucket = "of-the-first-account"')
    assert refusal("past_jobs").startswith("there is no bucket s3://of-the-first-account that admits your")


# ---------------------------------------------------------------- owner


def test_two_colleagues_with_the_same_name_do_not_end_each_others_cluster(
    aws: Api,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sign_in: Callable[[str, str], None],
    answer: Callable[[str], list[str]],
) -> None:
    Aws().prepare()
    head = launch_head(cluster_file.load(launcher_file.FILE))
    assert owner() == LAPTOP
    sign_in(ACCOUNT, "colleague")
    new_checkout()
    monkeypatch.setenv("HOME", str(tmp_path / "colleague"))  # without the private key
    drained: list[Any] = []
    monkeypatch.setattr(drain, "before_down", lambda *_: drained.append(1))
    whose = f"the cluster {FILE.slug} in account {ACCOUNT}, {FILE.region} belongs to {LAPTOP}. "
    for verb in ("down", "prepare", "up"):
        agree = f"To agree, run: inv {verb} --target aws --owner {LAPTOP}   For a cluster of your own, write another"
        assert refusal(verb).startswith(f"{whose}{agree} cluster_name in all places")
    asked = answer("n")
    assert [refusal(verb) for verb in ("down", "prepare", "up")] == ["you did not agree, so nothing was done"] * 3
    assert asked == [f"{whose}end it? [y/N] ", *[f"{whose}is it yours, too? [y/N] "] * 2]
    with pytest.raises(UserError) as caught:
        Aws().prepare(owner=LAPTOP)
    assert "is not on this machine. Copy it from its owner's machine (the cluster" in str(caught.value)
    assert "inv down" not in str(caught.value)
    assert identity.read() is None, "who lacks the key has not joined"
    assert not drained
    assert [one.id for one in instances.living(FILE)] == [head]
    asked = answer("y")
    assert Aws().down(drain_s=20) == []
    assert drained
    assert len(asked) == 1


def test_a_colleague_who_has_the_key_joins_once(
    aws: Api, monkeypatch: pytest.MonkeyPatch, sign_in: Callable[[str, str], None]
) -> None:
    Aws().prepare()
    sign_in(ACCOUNT, "colleague")
    new_checkout()
    monkeypatch.setattr(prepare, "_own_address", lambda: "203.0.113.8")  # so that the stack is updated
    Aws().prepare(owner=LAPTOP)
    assert owner() == LAPTOP, "an update keeps the owner"
    assert identity.read() == identity.Identity(ACCOUNT, FILE.region, FILE.slug, LAPTOP)
    moto: Any = cloudformation_backends[ACCOUNT][FILE.region].get_stack(FILE.slug)
    moto.status = "ROLLBACK_COMPLETE"
    monkeypatch.setattr(prepare, "_make_bucket", lambda file: "no")  # the bucket is kept
    Aws().prepare()  # without a question, also if another user or role of the account runs it
    assert owner() == LAPTOP, "a new stack in place of a failed one keeps the owner"


def test_a_second_laptop_of_the_owner_is_not_asked(aws: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Aws().prepare()
    new_checkout()
    Aws().prepare()  # with the key, which is copied
    new_checkout()
    monkeypatch.setenv("HOME", str(tmp_path / "laptop"))
    with pytest.raises(UserError, match=r"Copy it from the machine that ran `inv up`, or end the cluster: inv"):
        key_pair.ensure(FILE, LAPTOP)
    key_pair._make_key(FILE.key_file)
    with pytest.raises(UserError, match=r"Replace it with the key from the machine that ran `inv up`, or end"):
        key_pair.ensure(FILE, LAPTOP)


def test_a_record_is_no_consent_to_end_a_later_cluster_of_somebody_else(
    aws: Api, sign_in: Callable[[str, str], None]
) -> None:
    """The first cluster was ended from another checkout, so the record of this one is still there."""
    sign_in(ACCOUNT, "colleague")
    Aws().prepare()
    sign_in(ACCOUNT, "laptop")
    identity.record(FILE, LAPTOP)
    assert f"belongs to {COLLEAGUE}. To agree, run" in refusal()
    assert stack.find(FILE)


def test_the_stack_of_an_older_version_keeps_its_tags(aws: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new tag of the stack would replace its placement groups, in which workers may run."""
    Aws().prepare()
    moto: Any = cloudformation_backends[ACCOUNT][FILE.region].get_stack(FILE.slug)
    moto.tags = {"ray-project": FILE.slug, "cost-center": "7", "aws:of": "AWS, which accepts no such tag"}
    monkeypatch.setattr(prepare, "_own_address", lambda: "203.0.113.8")  # moto refuses an update of tags alone
    assert ownership.is_mine(FILE, ownership.UNKNOWN)
    new_checkout()
    whose = f"the cluster {FILE.slug} in account {ACCOUNT}, {FILE.region} does not say whose it is"
    assert refusal("prepare").startswith(f"{whose}. To agree, run: inv prepare --target aws --owner unknown")
    Aws().prepare(owner="unknown")
    assert {tag["Key"]: tag["Value"] for tag in (stack.find(FILE) or {})["Tags"]} == {
        **{"ray-project": FILE.slug, "cost-center": "7"},
    }
    Aws().prepare()  # without another question, because this checkout now has a record


def test_the_stack_has_the_owner_that_the_checkout_has_recorded(aws: Api, sign_in: Callable[[str, str], None]) -> None:
    """The name of a role's session may have changed since the first attempt to make the stack."""
    sign_in(ACCOUNT, "colleague")
    key_pair.ensure(FILE, ownership.record(FILE))
    sign_in(ACCOUNT, "laptop")
    Aws().prepare()
    assert ownership.find(FILE) == COLLEAGUE
    assert Aws().down() == []


def test_down_ends_the_machines_of_its_checkout_although_cloudformation_does_not_answer(
    aws: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    Aws().prepare()
    launch_head(cluster_file.load(launcher_file.FILE))
    monkeypatch.setattr(aws.faults, "organization_denies", ["cloudformation:*"])
    left = Aws().down()
    assert instances.living(FILE) == []
    assert any("a stack, because" in one for one in left)
    assert identity.read()


def test_a_key_pair_without_a_stack_has_an_owner(aws: Api, sign_in: Callable[[str, str], None]) -> None:
    """For example while `prepare` makes the stack."""
    key_pair.ensure(FILE, LAPTOP)
    sign_in(ACCOUNT, "colleague")
    assert f"belongs to {LAPTOP}. To agree" in refusal()


def test_the_doctor_reports_the_owner(aws: Api, sign_in: Callable[[str, str], None]) -> None:
    def findings() -> list[tuple[str, str]]:
        clients = {service: FILE.client(service) for service in ("ec2", "sts", "cloudformation")}
        account = Account(FILE.content, FILE.digest, caller.ask(FILE).arn, clients)
        return [(one.status, one.text) for one in doctors_owner.check(account)]

    assert findings() == []
    Aws().prepare()
    whose = f"the cluster {FILE.slug} in account {ACCOUNT}, {FILE.region} belongs to {LAPTOP}"
    assert findings() == [("ok", whose)]
    new_checkout()
    assert findings() == [("ok", whose)]
    sign_in(ACCOUNT, "colleague")
    ((status, text),) = findings()
    assert status == "warning"
    assert text.startswith(f"{whose}. inv up and inv down will ask")


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("user/ada", "user/ada"),
        ("user/team/ada,bob", "user/team/ada_bob"),
        (
            "assumed-role/AWSReservedSSO_Admin_0a/ada@a.org",
            "assumed-role/AWSReservedSSO_Admin_0a/ada@a.org",
        ),
        (f"user/{'a' * 300}", f"user/{'a' * (256 - len('arn:aws:iam::1:user/'))}"),
    ],
)
def test_aws_accepts_the_owner_as_a_tag(name: str, tag: str) -> None:
    assert Caller("1", f"arn:aws:iam::1:{name}").owner == f"arn:aws:iam::1:{tag}"
