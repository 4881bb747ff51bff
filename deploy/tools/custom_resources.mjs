// Reads a JSON list of resources and prints a JSON list of faults: one text for each resource that its schema refuses.
// Run it from the folder whose node_modules holds the schemas.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const models = `${process.cwd()}/node_modules/@kubernetes-models`;
const kinds = {
  "monitoring.coreos.com/v1/ServiceMonitor": `${models}/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor`,
  "monitoring.coreos.com/v1/PodMonitor": `${models}/prometheus-operator/monitoring.coreos.com/v1/PodMonitor`,
  "monitoring.coreos.com/v1/PrometheusRule": `${models}/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule`,
  "keda.sh/v1alpha1/ScaledObject": `${models}/keda/keda.sh/v1alpha1/ScaledObject`,
  "gateway.networking.k8s.io/v1/HTTPRoute": `${models}/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute`,
};

const faults = [];
for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const kind = `${resource.apiVersion}/${resource.kind}`;
  if (!(kind in kinds)) {
    faults.push(`${kind}: no schema is known`);
    continue;
  }
  const { [resource.kind]: Model } = await import(pathToFileURL(`${kinds[kind]}.js`));
  try {
    new Model(resource).validate();
  } catch (error) {
    faults.push(`${kind} ${resource.metadata.name}: ${error.message}`);
  }
}
process.stdout.write(JSON.stringify(faults));
