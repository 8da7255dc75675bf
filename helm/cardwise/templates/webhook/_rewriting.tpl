{{/* The beginning of a mutating configuration; the entries follow. `name`: its name. */}}
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
Entries that both mutating configurations have. `.late`: the entries of the second configuration, for additions of
webhooks that run after the first (docs/design/0030-order-of-webhooks.md). They match pods and templates only if
something is still to be rewritten, so that the webhook is not called twice without need. They match all quotas, because
only the webhook can tell which amounts are MiB already.
*/}}
{{- define "cardwise.webhook.rewriting" -}}
{{- $root := .root -}}{{- $late := .late -}}{{- $suffix := $late | ternary "-late" "" }}
  # Pods that request a share get the canonical request, share slots and environment variables.
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
          {{- include "cardwise.cel.needsRewrite" $root | nindent 10 }}
      {{- else }}
      - name: asks-for-a-share
        expression: |-
          {{- include "cardwise.cel.isOurs" $root | nindent 10 }}
      {{- end }}
  {{- end }}
  # Quotas: amounts such as 64Gi, which Kubernetes would count in bytes although the amounts of pods are in MiB, and
  # bare names of classes. A LimitRange that is too long for CEL's cost limit is sent, and the webhook refuses it with a
  # reason.
  {{- range $other := list false true }}
  {{- include "cardwise.webhook.entryByUnit" (dict "root" $root "other" $other "name" (print "quotas" $suffix) "path" "/mutate") | nindent 2 }}
    reinvocationPolicy: IfNeeded
    rules:
      - {operations: [CREATE, UPDATE], apiGroups: [""], apiVersions: [v1], resources: [resourcequotas, limitranges], scope: Namespaced}
    matchConditions:
      {{- include "cardwise.webhook.notBeingDeleted" $root | nindent 6 }}
      - name: names-what-we-rewrite
        expression: |-
          {{ include "cardwise.cel.hasAnnotation" "cardwise.dev/rewritten" }} ||
          {{- include "cardwise.cel.quotaIsOurs" $root | nindent 10 }} ||
          [{{ include "cardwise.cel.limitRangeAmounts" . }}].exists(amounts,
            amounts.size() > 2097152 || amounts.contains('"aliyun.com/gpu-mem":'))
  {{- end }}
  # Workloads whose template Kubernetes would refuse because of a bare name; one entry for each path of a template.
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
