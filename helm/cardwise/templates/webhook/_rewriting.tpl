{{/* A mutating configuration of this name, up to its entries. */}}
{{- define "cardwise.webhook.mutating" }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata:
  name: {{ .name }}
  labels:
    {{- include "cardwise.labels" (dict "root" .root "component" "webhook") | nindent 4 }}
webhooks:
{{- end }}

{{/*
Entries that both mutating configurations have. `.late`: those of the second, which are for what another webhook has added
after the first (docs/design/0030-order-of-webhooks.md); for pods and templates only where something is to be rewritten
still, so that nothing comes twice for nothing. All quotas come twice: which of their amounts are MiB already is for the
webhook to say.
*/}}
{{- define "cardwise.webhook.rewriting" -}}
{{- $root := .root -}}{{- $late := .late -}}{{- $suffix := $late | ternary "-late" "" }}
  # Pods that ask for a share: canonical request, share slots, environment.
  {{- range $other := list false true }}
  {{- include "cardwise.webhook.entryByUnit" (dict "root" $root "other" $other "name" (print "pods" $suffix) "path" "/mutate") | nindent 2 }}
    reinvocationPolicy: IfNeeded
    rules:
      - {operations: [CREATE], apiGroups: [""], apiVersions: [v1], resources: [pods], scope: Namespaced}
    matchConditions:
      {{- include "cardwise.webhook.podConditions" $root | nindent 6 }}
      {{- if $late }}
      - name: not-rewritten-yet
        expression: |-
          {{- include "cardwise.cel.unwritten" $root | nindent 10 }}
      {{- else }}
      - name: asks-for-a-share
        expression: |-
          {{- include "cardwise.cel.isOurs" $root | nindent 10 }}
      {{- end }}
  {{- end }}
  # Amounts such as 64Gi, which the quota would count in bytes where pods count MiB; and classes by their bare names.
  {{- range $other := list false true }}
  {{- include "cardwise.webhook.entryByUnit" (dict "root" $root "other" $other "name" (print "quotas" $suffix) "path" "/mutate") | nindent 2 }}
    reinvocationPolicy: IfNeeded
    rules:
      - {operations: [CREATE, UPDATE], apiGroups: [""], apiVersions: [v1], resources: [resourcequotas, limitranges], scope: Namespaced}
    matchConditions:
      {{- include "cardwise.webhook.notBeingDeleted" $root | nindent 6 }}
      - name: names-what-we-rewrite
        expression: |-
          {{ include "cardwise.cel.annotated" "cardwise.dev/rewritten" }} ||
          {{- include "cardwise.cel.quotaIsOurs" $root | nindent 10 }} ||
          {{ include "cardwise.cel.limitRangeAmounts" . }}.contains('"aliyun.com/gpu-mem":')
  {{- end }}
  # Workloads whose template Kubernetes would refuse for a bare name; one entry for each place where a template can be.
  - name: workloads{{ $suffix }}.cardwise.dev
    {{- include "cardwise.webhook.entry" (dict "root" $root "path" "/mutate") | nindent 4 }}
    reinvocationPolicy: IfNeeded
    rules:
      - {operations: [CREATE, UPDATE], apiGroups: [apps], apiVersions: [v1], resources: [deployments, replicasets, statefulsets, daemonsets], scope: Namespaced}
      - {operations: [CREATE, UPDATE], apiGroups: [batch], apiVersions: [v1], resources: [jobs], scope: Namespaced}
      - {operations: [CREATE, UPDATE], apiGroups: [""], apiVersions: [v1], resources: [replicationcontrollers], scope: Namespaced}
    matchConditions:
      {{- include "cardwise.webhook.templateConditions" (dict "root" $root "late" $late "path" ".?spec.?template.?spec") | nindent 6 }}
  - name: cronjobs{{ $suffix }}.cardwise.dev
    {{- include "cardwise.webhook.entry" (dict "root" $root "path" "/mutate") | nindent 4 }}
    reinvocationPolicy: IfNeeded
    rules:
      - {operations: [CREATE, UPDATE], apiGroups: [batch], apiVersions: [v1], resources: [cronjobs], scope: Namespaced}
    matchConditions:
      {{- include "cardwise.webhook.templateConditions" (dict "root" $root "late" $late "path" ".?spec.?jobTemplate.?spec.?template.?spec") | nindent 6 }}
  - name: podtemplates{{ $suffix }}.cardwise.dev
    {{- include "cardwise.webhook.entry" (dict "root" $root "path" "/mutate") | nindent 4 }}
    reinvocationPolicy: IfNeeded
    rules:
      - {operations: [CREATE, UPDATE], apiGroups: [""], apiVersions: [v1], resources: [podtemplates], scope: Namespaced}
    matchConditions:
      {{- include "cardwise.webhook.templateConditions" (dict "root" $root "late" $late "path" ".?template.?spec") | nindent 6 }}
{{- end }}
