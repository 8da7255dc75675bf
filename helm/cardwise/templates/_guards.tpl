{{/* Which scheduler.mode is for whom. */}}
{{- define "cardwise.scheduler.modes" -}}
{{- print "  kubeadm   control planes of kubeadm (also kind and minikube): a Job edits kube-scheduler's manifest on each control plane node\n" -}}
{{- print "  own       managed (EKS, GKE, AKS, ...), k3s, RKE2, Talos: Cardwise runs a second kube-scheduler; needs scheduler.image\n" -}}
{{- print "  manual    you edit kube-scheduler's configuration yourself: the notes after the installation say how" -}}
{{- end }}

{{/* Whether nodes have an MPS manager. Without one in this release, what an earlier one left there is not waited for. */}}
{{- define "cardwise.deviceplugin.mps" -}}
{{- if ne .Values.deviceplugin.mps "auto" }}{{ .Values.deviceplugin.mps }}{{ else if .Values.mps.enabled }}preferred{{ else }}off{{ end -}}
{{- end }}

{{/* Whether objects of the Prometheus Operator are wanted: `enabled` is auto, true or false. */}}
{{- define "cardwise.monitoring.wanted" -}}
{{- $there := .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}
{{- if or (and (eq (toString .enabled) "auto") $there) (eq (toString .enabled) "true") }}true{{ end -}}
{{- end }}

{{/* A drain takes one replica at a time. */}}
{{- define "cardwise.disruption" }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: cardwise-{{ .component }}
  namespace: {{ include "cardwise.namespace" .root | quote }}
  labels: {{- include "cardwise.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "cardwise.selector" . | nindent 6 }}
{{- end }}

{{/* Whether pods can connect to the webhook: nobody has to show a certificate, and no NetworkPolicy names the API servers. */}}
{{- define "cardwise.webhook.open" -}}
{{- $named := and .Values.networkPolicies.enabled (not .Values.webhook.hostNetwork) .Values.networkPolicies.sources.apiServer -}}
{{- if and .Values.webhook.enabled (not .Values.webhook.clientCA) (not $named) }}true{{ end -}}
{{- end }}

{{/* By these ports and no others: `ports` by who is to reach them, as networkPolicies.sources names them. */}}
{{- define "cardwise.reached" }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: cardwise-{{ .component }}
  namespace: {{ include "cardwise.namespace" .root | quote }}
  labels: {{- include "cardwise.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "cardwise.selector" . | nindent 6 }}
  policyTypes: [Ingress]
  ingress:
    {{- range $who, $ports := .ports }}
    - ports:
        {{- range $ports }}
        - {protocol: TCP, port: {{ . }}}
        {{- end }}
      {{- with index $.root.Values.networkPolicies.sources $who }}
      from: {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- end }}
{{- end }}
