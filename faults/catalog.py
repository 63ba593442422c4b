"""The list of all faults. This module imports only the standard library, so `./inv faults --list` needs no project."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault and the behavior that its test expects."""

    name: str
    expected: str
    test: str
    """MODULE.FUNCTION in this package. The function takes a `Harness` and returns a summary of what happened."""


FAULTS = [
    Fault("no spot capacity in the first zone", "the gang starts in the next zone", "capacity.first_zone_refuses"),
    Fault("half a gang", "the job releases that half, and the gang starts in another zone", "capacity.half_a_gang"),
    Fault("no spot capacity anywhere", "the gang starts on demand", "capacity.all_spot_refuses"),
    Fault("no quota for spot instances", "the doctor warns, and the gang starts on demand", "capacity.no_spot_quota"),
    Fault("no capacity for the preferred type", "the gang starts on the next type", "capacity.preferred_type_refuses"),
    Fault("another instance type for serving", "a replica's machine has that type", "capacity.serving_type"),
    Fault(
        "a model on two machines whose GPUs do not work",
        "Ray reserves all GPUs of both; serve_llm says why the engine fails, and both machines end",
        "serving.engine_finds_no_gpu",
    ),
    Fault("no capacity at all", "the job reports that it waits, and continues later", "capacity.everything_refuses"),
    Fault(
        "spot interruption during training",
        "training resumes on a replacement, with the same losses",
        "capacity.spot_interruption",
    ),
    Fault(
        "spot interruption without replacement",
        "training continues with fewer workers",
        "capacity.interruption_without_replacement",
    ),
    Fault(
        "a Capacity Block ends during training",
        "training saves a checkpoint and resumes outside the block, with the same losses",
        "capacity.block_ends",
    ),
    Fault("eight workers", "all start in one zone", "capacity.eight_workers"),
    Fault("a setup command fails", "status reports it, and launches stop after three failures", "setup.setup_fails"),
    Fault("a launch ends early", "status says why, and the gang starts in another zone", "capacity.launch_ends_early"),
    Fault("a key of the account's own for disks", "the gang starts", "capacity.own_key_for_disks"),
    Fault("a machine lacks a GPU", "status names it, and another machine takes the job", "setup.machine_lacks_a_gpu"),
    Fault(
        "another Python on a worker", "Ray rejects the worker, and status says why", "setup.other_python_on_a_worker"
    ),
    Fault("another Ray on the laptop", "the doctor rejects it", "setup.other_ray_on_the_laptop"),
    Fault("no boto3 on the head", "up fails and says why; the next up repairs the head", "setup.boto3_missing"),
    Fault(
        "up again",
        "without changes, jobs continue; with changes, up first warns that running jobs will end",
        "operators.up_again",
    ),
    Fault(
        "the watchdog's code changes",
        "up updates it on every machine without stopping jobs, and reports code that does not work",
        "operators.watchdog_changes",
    ),
    Fault(
        "everything at once",
        "the gang starts; down waits for slow machines, and the next up works at once",
        "capacity.everything_at_once",
    ),
    Fault(
        "the cheapest zone lacks the head's type",
        "the head starts in another zone, and the gang in the cheapest",
        "capacity.cheapest_zone_lacks_the_heads_type",
    ),
    Fault("subnets of one's own", "the cluster works there, and the network stays as it was", "operators.own_subnets"),
    Fault("a permission is missing", "the verb names it", "operators.permission_missing"),
    Fault("a job with a secret", "the secret leaks nowhere", "operators.secret_stays_secret"),
    Fault("two clusters at the same time", "each project sees only its own machines", "operators.two_clusters"),
    Fault("Ray killed on the head", "up repairs the head within 3 minutes", "heads.ray_on_the_head_killed"),
    Fault(
        "head killed during training",
        "up replaces it within 3 minutes, and the job resumes when submitted again",
        "heads.head_killed",
    ),
    Fault("the head reboots", "its lease ends it, because a reboot ends the watchdog", "heads.head_reboots"),
    Fault("head lost for good", "workers terminate themselves", "heads.head_lost"),
    Fault("time limit", "inv limits raises it; then the cluster terminates itself", "heads.time_limit"),
    Fault("spend limit", "the cluster terminates itself", "heads.spend_limit"),
    Fault(
        "prices unknown",
        "the limit counts the highest prices and ends the cluster; status says so",
        "heads.prices_unknown",
    ),
    Fault("full disk on the head", "status warns, and a limit still ends the cluster", "heads.full_disk"),
    Fault("nobody uses the cluster", "it warns, and then it terminates itself", "heads.nobody_uses_the_cluster"),
    Fault("no watchdog works", "the guard outside the cluster ends every machine", "heads.no_watchdog_works"),
    Fault("up interrupted three times", "down leaves nothing", "operators.interrupted_up"),
    Fault("plain ray up and ray down", "both work, and no machine is left", "operators.plain_ray"),
    Fault("the stack is busy", "verbs that change it wait for each other", "operators.busy_stack"),
    Fault("volumes vanish during down", "down deletes the rest, and nothing is left", "operators.volumes_vanish"),
    Fault("down from another checkout, twice", "nothing is left", "operators.down_twice"),
    Fault(
        "another account, region or owner",
        "down refuses and ends nothing; each account's own down leaves nothing",
        "operators.another_account_region_or_owner",
    ),
]


def choose(only: str) -> list[Fault]:
    """Return the faults whose names contain one of the comma-separated parts of `only`, or all faults if it is empty.

    Raises:
        ValueError: one of the parts matches no fault.
    """
    parts = [part.strip() for part in only.split(",") if part.strip()]
    for part in parts:
        if not any(part in fault.name for fault in FAULTS):
            raise ValueError(f"no fault name contains {part!r}. List the names with: ./inv faults --list")
    return [fault for fault in FAULTS if not parts or any(part in fault.name for part in parts)]
