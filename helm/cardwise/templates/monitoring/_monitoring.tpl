{{/*
Refuses the installation if a value requires the Prometheus Operator's kinds and the cluster does not have them.
*/}}
{{- define "cardwise.monitoring.api" -}}
{{- if not (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") }}
{{- fail (printf "%s: the cluster has no monitoring.coreos.com/v1; install the Prometheus Operator first, or leave the value out and scrape the ports named metrics (docs/admin.md). Without a cluster (helm template, GitOps) add --api-versions monitoring.coreos.com/v1" .value) }}
{{- end }}
{{- end }}

{{/*
The metadata of an object for monitoring. `of`: the values with the `labels` by which Prometheus or Grafana selects it.
*/}}
{{- define "cardwise.monitoring.labels" -}}
{{- $own := include "cardwise.labels" (dict "root" .root "component" "monitoring") | fromYaml }}
{{- merge (deepCopy .of.labels) $own | toYaml }}
{{- end }}
