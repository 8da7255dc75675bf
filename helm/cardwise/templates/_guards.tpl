{{/* The modes of scheduler.mode, each with the clusters that it is for. */}}
{{- define "cardwise.scheduler.modes" -}}
{{- print "  kubeadm   control planes of kubeadm (also kind and minikube): a Job edits kube-scheduler's manifest on each control plane node\n" -}}
{{- print "  own       managed (EKS, GKE, AKS, ...), k3s, RKE2, Talos: Cardwise runs a second kube-scheduler; needs scheduler.image\n" -}}
{{- print "  claims    Kubernetes 1.34 and later, whoever runs the control plane: kube-scheduler stays as it is and obeys ResourceClaims\n" -}}
{{- print "  manual    you edit kube-scheduler's configuration yourself: the notes after the installation say how" -}}
{{- end }}

{{/*
deviceplugin.mps, with `auto` resolved. Without an MPS manager in this release, containers do not wait for one.
*/}}
{{- define "cardwise.deviceplugin.mps" -}}
{{- if ne .Values.deviceplugin.mps "auto" }}{{ .Values.deviceplugin.mps }}{{ else if .Values.mps.enabled }}seen{{ else }}never{{ end -}}
{{- end }}

{{/* Whether to create objects of the Prometheus Operator: `enabled` is auto, true or false. */}}
{{- define "cardwise.monitoring.isEnabled" -}}
{{- $there := .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}
{{- if or (and (eq (toString .enabled) "auto") $there) (eq (toString .enabled) "true") }}true{{ end -}}
{{- end }}

{{/* A PodDisruptionBudget: draining nodes evicts one replica at a time. */}}
{{- define "cardwise.podDisruptionBudget" }}
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

{{/*
Whether all pods can connect to the webhook: without a required client certificate and a NetworkPolicy for API servers.
*/}}
{{- define "cardwise.webhook.isOpen" -}}
{{- $named := and .Values.networkPolicies.enabled (not .Values.webhook.hostNetwork) .Values.networkPolicies.sources.apiServer -}}
{{- if and .Values.webhook.enabled (not .Values.webhook.clientCA) (not $named) }}true{{ end -}}
{{- end }}

{{/*
A NetworkPolicy that opens only these ports. `ports`: lists of ports by client, with the names of
networkPolicies.sources.
*/}}
{{- define "cardwise.networkPolicy" }}
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
