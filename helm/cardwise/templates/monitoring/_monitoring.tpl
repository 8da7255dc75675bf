{{/* Refuses kinds that the cluster does not have, with the value that asks for them. */}}
{{- define "cardwise.monitoring.api" -}}
{{- if not (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") }}
{{- fail (printf "%s: the cluster has no monitoring.coreos.com/v1; install the Prometheus Operator first, or leave the value out and scrape the ports named metrics (docs/admin.md). Without a cluster (helm template, GitOps) add --api-versions monitoring.coreos.com/v1" .value) }}
{{- end }}
{{- end }}

{{/* `of`: the values whose `labels` people choose for whoever picks the object up. */}}
{{- define "cardwise.monitoring.labels" -}}
{{- $own := include "cardwise.labels" (dict "root" .root "component" "monitoring") | fromYaml }}
{{- merge (deepCopy .of.labels) $own | toYaml }}
{{- end }}
