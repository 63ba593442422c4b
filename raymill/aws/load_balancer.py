"""The load balancer that serves the model over HTTPS, if [cluster.network] names a certificate."""

from raymill import settings
from raymill.aws import stack, vpc
from raymill.common.cluster_file import ClusterFile
from raymill.errors import UserError
from raymill.ray_support.aws_sections import NetworkSection
from raymill.serving.options import ServeOptions


def stack_parameters(section: NetworkSection, network: vpc.Network) -> dict[str, str]:
    """Return the stack's parameters for a load balancer, or {} if the settings name no certificate.

    Raises:
        UserError: the network has only one zone.
    """
    if not section.certificate:
        return {}
    if network.zones[0] == network.zones[1]:
        raise UserError(
            "a load balancer needs two zones, but the cluster has only one. Set another region in "
            "cluster/cluster.yaml, or remove certificate from [cluster.network] of settings.toml"
        )
    port = settings.load(ServeOptions, "serve", profile="cluster").port
    return {"Certificate": section.certificate, "Clients": section.clients, "ServePort": str(port)}


def register(file: ClusterFile, head_id: str) -> None:
    """If the stack has a load balancer, make it forward requests to the head."""
    described = stack.find(file)
    outputs = {one["OutputKey"]: one["OutputValue"] for one in (described or {}).get("Outputs", [])}
    if "HttpsTargets" in outputs:
        targets = {"TargetGroupArn": outputs["HttpsTargets"], "Targets": [{"Id": head_id}]}
        file.client("elbv2").register_targets(**targets)
        print(
            f"https: {outputs['HttpsName']} forwards requests to the served model, for about 20 dollars per month. "
            "Point a CNAME record with the certificate's name to this address"
        )
