{{/*
CEL expressions that several objects share. The API server itself evaluates CEL, so a pod that requests nothing of
Cardwise never depends on the webhook. Lists of values are rendered as CEL lists; values.schema.json allows no quotes in
them.
*/}}
{{- define "cardwise.cel.list" -}}
[{{- range $i, $item := . }}{{ if $i }}, {{ end }}'{{ $item }}'{{ end -}}]
{{- end }}

{{/*
The limits and requests of all containers of the pod spec `.` as one text. In this text each key has the form "key": and
no amount contains a slash, so a key can be found by a search. It is a text because users may write thousands of limits
and requests (see cardwise.cel.keys). dyn: the type checker of policies does not know limits. null: a template may have
no containers; Kubernetes refuses it later.
*/}}
{{- define "cardwise.cel.amounts" -}}
'%s'.format([[
{{- range $i, $field := list "containers" "initContainers" }}{{ if $i }}, {{ end -}}
(has({{ $ }}.{{ $field }}) && dyn({{ $ }}.{{ $field }}) != null ? dyn({{ $ }}.{{ $field }}) : []).map(c, [c.?resources.?limits.orValue({}), c.?resources.?requests.orValue({})])
{{- end }}]])
{{- end }}

{{/*
Whether the text `amounts` of cardwise.cel.amounts is too long for the searches below: CEL limits the cost of an
expression, and a pod would be refused without a reason. Objects with longer texts are sent to the webhook, which
refuses them and names the field (webhook/server/sizes.py). Real pods have some KiB.
*/}}
{{- define "cardwise.cel.amountsTooLong" -}}
amounts.size() > 262144
{{- end }}

{{/*
Whether the pod spec `spec` meets the condition `holds`, which is about the text `amounts` of cardwise.cel.amounts.
*/}}
{{- define "cardwise.cel.amountsAre" -}}
[{{ include "cardwise.cel.amounts" .spec }}].exists(amounts, {{ .holds }})
{{- end }}

{{/*
Whether the `amounts` contain one of Cardwise's resources that users request. Ten characters are searched first, because
the cost of a search grows with each ten characters.
*/}}
{{- define "cardwise.cel.haveShares" -}}
amounts.contains('"aliyun.co') && (amounts.contains('"aliyun.com/gpu-mem":') || amounts.contains('"aliyun.com/gpu-count":') || amounts.contains('"aliyun.com/gpu-core.percentage":'))
{{- end }}

{{/* Whether the `amounts` contain a resource of the domain cardwise.dev. */}}
{{- define "cardwise.cel.haveOwn" -}}
amounts.contains('"cardwise.') && amounts.contains('"cardwise.dev/')
{{- end }}

{{/*
Whether the `amounts` contain a bare name: a name without a domain that is not one of Kubernetes' own. Kubernetes would
refuse it; the webhook knows which bare names are ResourceClasses.
*/}}
{{- define "cardwise.cel.haveBare" -}}
!amounts.findAll('"[^/"]*":').join('')
{{- range list "cpu" "memory" "storage" "ephemeral-storage" }}.replace('"{{ . }}":', ''){{ end -}}
.matches('^("hugepages-[^"]*":)*$')
{{- end }}

{{/* Whether the `amounts` contain a key that the webhook rewrites, in any spelling. */}}
{{- define "cardwise.cel.haveRewritten" -}}
({{ include "cardwise.cel.haveShares" . }}) || ({{ include "cardwise.cel.haveOwn" . }}) || {{ include "cardwise.cel.haveBare" . }}
{{- if eq .Values.webhook.nvidiaGpu "take" }} || amounts.contains('"nvidia.com/gpu":'){{ end }}
{{- end }}

{{/* Whether the resource `k` is one of Cardwise's that users request, or has the domain cardwise.dev. */}}
{{- define "cardwise.cel.ourResource" -}}
k in ['aliyun.com/gpu-mem', 'aliyun.com/gpu-count', 'aliyun.com/gpu-core.percentage'] || k.startsWith('cardwise.dev/')
{{- end }}

{{/* Whether the resource `k` is a bare name in the sense of cardwise.cel.haveBare. */}}
{{- define "cardwise.cel.bareName" -}}
!k.contains('/') && !(k in ['cpu', 'memory', 'storage', 'ephemeral-storage']) && !k.startsWith('hugepages-')
{{- end }}

{{/*
Whether a key of a ResourceQuota's spec.hard is a bare name. There Kubernetes has more names of its own than in
containers.
*/}}
{{- define "cardwise.cel.bareQuotaName" -}}
{{ include "cardwise.cel.bareName" . }} && !k.startsWith('requests.') && !k.startsWith('limits.') && !(k in ['pods', 'services', 'secrets', 'configmaps', 'persistentvolumeclaims', 'replicationcontrollers', 'resourcequotas', 'services.loadbalancers', 'services.nodeports'])
{{- end }}

{{/*
Whether the key `k` of a ResourceQuota's spec.hard names a resource of Cardwise in a form that the webhook rewrites.
*/}}
{{- define "cardwise.cel.ourQuotaName" -}}
k.endsWith('aliyun.com/gpu-mem') || k.endsWith('aliyun.com/gpu-count') ||
k in ['aliyun.com/gpu-core.percentage', 'limits.aliyun.com/gpu-core.percentage', 'requests.cardwise.dev/place', 'requests.cardwise.dev/bind'] ||
k.startsWith('cardwise.dev/') || k.startsWith('limits.cardwise.dev/')
{{- if eq .Values.webhook.nvidiaGpu "take" }} ||
k in ['nvidia.com/gpu', 'requests.nvidia.com/gpu', 'limits.nvidia.com/gpu']
{{- end }}
{{- end }}

{{/* All amounts of the LimitRange `object` as text, in the form of cardwise.cel.amounts. */}}
{{- define "cardwise.cel.limitRangeAmounts" -}}
'%s'.format([object.?spec.?limits.orValue([])])
{{- end }}

{{/*
Whether the ResourceQuota `object` has a key that the webhook rewrites. At most 64 candidates are checked here; a quota
with more is always sent to the webhook.
*/}}
{{- define "cardwise.cel.quotaIsOurs" -}}
['%s'.format([object.?spec.?hard.orValue({})])].exists(amounts,
  [amounts.findAll('"[^/"]*":', 64) + (amounts.contains('aliyun.com') || amounts.contains('cardwise.d') || amounts.contains('nvidia.com') ?
    amounts.findAll('"[^"/]*(aliyun[.]com|cardwise[.]dev|nvidia[.]com)/[^"]*":', 64) : [])].exists(found,
    found.size() >= 64 || found.map(k, k.split('"')[1]).exists(k,
    {{- include "cardwise.cel.ourQuotaName" . | nindent 4 }} ||
    ({{ include "cardwise.cel.bareQuotaName" . }}))))
{{- end }}

{{/*
Whether the pod spec `spec` has a container `c` with a limit or request `k` for which the conditions `key` and `and`
(optional) are true. The cost grows with the square of the number of containers and limits. So it is evaluated only
after a test by cardwise.cel.amounts that few pods pass; for pods that request a share the webhook limits both numbers
(webhook/server/sizes.py).
*/}}
{{- define "cardwise.cel.containersHave" -}}
{{- $spec := .spec -}}{{- $key := .key -}}{{- $and := .and -}}
(
{{- range $i, $field := list "containers" "initContainers" }}
  {{- if $i }} ||{{ end }}
  (has({{ $spec }}.{{ $field }}) && dyn({{ $spec }}.{{ $field }}) != null && dyn({{ $spec }}.{{ $field }}).exists(c, has(c.resources) && {{ with $and }}{{ . }} && {{ end }}(
    (has(c.resources.limits) && c.resources.limits.exists(k, {{ $key }})) ||
    (has(c.resources.requests) && c.resources.requests.exists(k, {{ $key }})))))
{{- end }})
{{- end }}

{{/*
Whether any container of the pod `object` requests a resource of Cardwise, in the form that the webhook has written. The
markers by which kube-scheduler calls the extender for members of gangs do not count.
*/}}
{{- define "cardwise.cel.requestsCardwise" -}}
{{- $more := "amounts.split('\"cardwise.dev/').size() > amounts.split('\"cardwise.dev/place\":').size() + amounts.split('\"cardwise.dev/bind\":').size() - 1" -}}
{{- $asked := printf "(%s) || (%s && %s)" (include "cardwise.cel.haveShares" .) (include "cardwise.cel.haveOwn" .) $more -}}
{{ include "cardwise.cel.amountsAre" (dict "spec" "object.spec" "holds" $asked) }}
{{- end }}

{{/* Whether the pod or template `of` names both a gang and a scheduler that calls the extender. */}}
{{- define "cardwise.cel.namesGang" -}}
{{- $of := .of -}}
(has({{ $of }}.metadata) &&
 (!has({{ $of }}.spec) || !has({{ $of }}.spec.schedulerName) || {{ $of }}.spec.schedulerName in {{ include "cardwise.cel.list" (include "cardwise.gangSchedulers" .root | fromJsonArray) }}) &&
 ((has({{ $of }}.metadata.annotations) && ['scheduling.k8s.io/group-name', 'scheduling.k8s.io/group-pod-num'].exists(k, k in {{ $of }}.metadata.annotations)) ||
  (has({{ $of }}.metadata.labels) && ['scheduling.k8s.io/group-name', 'scheduling.k8s.io/group-pod-num', 'scheduling.x-k8s.io/pod-group'].exists(k, k in {{ $of }}.metadata.labels))))
{{- end }}

{{/*
Whether the pod `.` has the scheduling gate of Cardwise's gangs. There is no loop over the gates (see
cardwise.cel.keys). Of a pod with more than 1024 gates none is read, because this is evaluated many times at each write of
any pod. The webhook gives no such pod its gate: it takes members of gangs with at most 512 gates.
*/}}
{{- define "cardwise.cel.hasGangGate" -}}
(has({{ . }}.spec.schedulingGates) && {{ . }}.spec.schedulingGates.size() <= 1024 && 'cardwise.dev/gang' in {{ . }}.spec.schedulingGates.map(g, g.name))
{{- end }}

{{/*
Whether the pod `.` waits behind the gate of scheduler.mode=claims. There is no loop over the gates, and of a pod with
more than 1024 gates none is read (see cardwise.cel.hasGangGate).
*/}}
{{- define "cardwise.cel.hasAllocationGate" -}}
(has({{ . }}.spec.schedulingGates) && {{ . }}.spec.schedulingGates.size() <= 1024 && 'cardwise.dev/allocation' in {{ . }}.spec.schedulingGates.map(g, g.name))
{{- end }}

{{/* Whether the pod `.` names a claim of Cardwise, in the entry that the webhook writes. */}}
{{- define "cardwise.cel.hasClaim" -}}
(has({{ . }}.spec.resourceClaims) && 'cardwise' in {{ . }}.spec.resourceClaims.map(c, c.name))
{{- end }}

{{/* Whether the container `c` has a slot: the webhook has rewritten it, and its node gives it GPUs or devices. */}}
{{- define "cardwise.cel.hasSlot" -}}
{{- if eq .Values.scheduler.mode "claims" -}}
(has(c.resources) && has(c.resources.claims) && 'cardwise' in c.resources.claims.map(r, r.name))
{{- else -}}
(has(c.resources) && has(c.resources.limits) && 'cardwise.dev/share' in c.resources.limits)
{{- end }}
{{- end }}

{{/*
Whether the webhook has rewritten the pod `.`, which requests GPUs or devices; also in another scheduler.mode, before it
was changed.
*/}}
{{- define "cardwise.cel.wasRewritten" -}}
({{ include "cardwise.cel.hasClaim" . }} || {{ include "cardwise.cel.amountsAre" (dict "spec" (print . ".spec") "holds" "amounts.contains('\"cardwise.dev/share\":')") }})
{{- end }}

{{/*
Whether the pod `object` names the gate or a claim of Cardwise. The webhook refuses these in a pod that requests no GPU.
Names are searched as text (see cardwise.cel.keys).
*/}}
{{- define "cardwise.cel.namesClaims" -}}
({{ include "cardwise.cel.hasAllocationGate" "object" }} ||
 (has(object.spec.resourceClaims) && ('\n' + object.spec.resourceClaims.map(c, c.name + '\t' + c.?resourceClaimName.orValue('')).join('\n') + '\n').matches('\tcardwise-[0-9a-f]{16}\n|\ncardwise\t')))
{{- end }}

{{/*
Whether the pod `object` names a gang, or has the label or gate that the webhook gives only to members of gangs.
*/}}
{{- define "cardwise.cel.inGang" -}}
({{ include "cardwise.cel.namesGang" (dict "root" . "of" "object") }} ||
 (has(object.metadata.labels) && 'cardwise.dev/gang' in object.metadata.labels) ||
 {{ include "cardwise.cel.hasGangGate" "object" }})
{{- end }}

{{/* Whether the pod `object` requests a GPU in any of the spellings that the webhook rewrites, or is in a gang. */}}
{{- define "cardwise.cel.isOurs" -}}
[{{ include "cardwise.cel.amounts" "object.spec" }}].exists(amounts,
{{ include "cardwise.cel.isOursBy" . }})
{{- end }}

{{/* The condition of cardwise.cel.isOurs, for expressions that have the `amounts` already. */}}
{{- define "cardwise.cel.isOursBy" -}}
({{ include "cardwise.cel.amountsTooLong" . }} ||
{{ include "cardwise.cel.hasAnnotation" "cardwise.dev/class" }} ||
{{ include "cardwise.cel.inGang" . }} ||
{{- if eq .Values.scheduler.mode "claims" }}
{{ include "cardwise.cel.namesClaims" . }} ||
{{- end }}
{{ include "cardwise.cel.haveRewritten" . }})
{{- end }}

{{/*
Whether the webhook still has to rewrite the pod `object`: a container has a request but no share slot, a container
beside it has no variable that closes GPUs to it, the pod names a gang but has no label and gate of it, or no container
has got the pod's class. A member of a gang that requests nothing has the markers without a share slot. With
scheduler.mode=claims the slot is the container's entry in the claim, and all these pods have a gate.
*/}}
{{- define "cardwise.cel.needsRewrite" -}}
{{- $claims := eq .Values.scheduler.mode "claims" -}}
{{- $gated := include ($claims | ternary "cardwise.cel.hasAllocationGate" "cardwise.cel.hasGangGate") "object" -}}
{{- $labelled := "(has(object.metadata.labels) && 'cardwise.dev/gang' in object.metadata.labels)" -}}
{{- $key := printf "((%s) && !(k in ['cardwise.dev/place', 'cardwise.dev/bind'] && %s)) || (%s)" (include "cardwise.cel.ourResource" .) $gated (include "cardwise.cel.bareName" .) -}}
{{- if eq .Values.webhook.nvidiaGpu "take" }}{{ $key = printf "%s || k == 'nvidia.com/gpu'" $key }}{{ end -}}
{{- $slot := $claims | ternary (include "cardwise.cel.hasClaim" "object") "amounts.contains('\"cardwise.dev/share\":')" -}}
[{{ include "cardwise.cel.amounts" "object.spec" }}].exists(amounts, !({{ include "cardwise.cel.amountsTooLong" . }}) && (
(({{ include "cardwise.cel.haveRewritten" . }}) && {{ include "cardwise.cel.containersHave" (dict "spec" "object.spec" "key" $key "and" (print "!" (include "cardwise.cel.hasSlot" .))) }}) ||
({{ $slot }} && [object.spec.containers, has(object.spec.initContainers) ? object.spec.initContainers : []].exists(list,
  list.exists(c, !(has(c.env) && c.env.exists(e, e.name == 'NVIDIA_VISIBLE_DEVICES'))))) ||
{{- if $claims }}
({{ $labelled }} || {{ $slot }}) != {{ $gated }} ||
{{- else }}
{{ $labelled }} != {{ $gated }} ||
{{- end }}
({{ include "cardwise.cel.namesGang" (dict "root" . "of" "object") }} && !{{ $gated }}) ||
({{ include "cardwise.cel.hasAnnotation" "cardwise.dev/class" }} && !{{ $slot }})))
{{- end }}

{{/*
Whether the `amounts` contain a resource of any domain whose name suggests a GPU, by the rules of is_like_gpu in
cardwise/core/api/lookalikes.py. The replacement puts each key on a line of its own. Bare names match too, but
expressions that use this one have excluded them before.
*/}}
{{- define "cardwise.cel.looksLikeGpu" -}}
(amounts.contains('gpu') || amounts.contains('cuda') || amounts.contains('"aliyun.co') || amounts.contains('"nvidia.co') || amounts.contains('"cardwise.')) &&
amounts.replace('"', '\n').matches(r'(?m)gpu|cuda|^aliyun\.com/|^nvidia\.com/|^cardwise\.dev/')
{{- end }}

{{/*
Whether the `amounts` of a ResourceQuota or LimitRange, whose names may begin with `requests.` or `limits.`, suggest a
GPU.
*/}}
{{- define "cardwise.cel.quotaLooksLikeGpu" -}}
(amounts.contains('gpu') || amounts.contains('cuda') || amounts.contains('aliyun.com') || amounts.contains('nvidia.com') || amounts.contains('cardwise.d')) &&
amounts.replace('"', '\n').matches(r'(?m)gpu|cuda|^(requests\.|limits\.)?(aliyun\.com|nvidia\.com|cardwise\.dev)/')
{{- end }}

{{/*
Whether the `annotations` or `labels` of a pod or template have a key that is probably meant for Cardwise but that
Cardwise does not read, because it is misspelled or belongs to another GPU sharer. The rules are those of
suggest_pod_key in cardwise/core/api/lookalikes.py. Users may write thousands of keys, so they are searched as text, and
only the first matches are checked one by one, which suffices for warnings.
*/}}
{{- define "cardwise.cel.keysAboutUs" -}}
[{{ .annotations }}, {{ .labels }}].exists(keys,
{{ include "cardwise.cel.containsAny" (dict "value" "keys" "words" (list "ardwise" "ARDWISE" "gpu" "hami.io/" "scheduling")) }} &&
{{ include "cardwise.cel.keys" "keys" }}.findAll(r'(?m)^.*(?:(?i:cardwise)|^gpu-(fraction|memory)|/(no)?use-gpu|^hami\.io/|^scheduling\.(x-)?k8s\.io/(pod-?)?(group|gang)|^pod-group\.scheduling\.|^gang\.scheduling\.).*', 64).exists(k,
!k.startsWith('cardwise.dev/') &&
!(k in ['scheduling.k8s.io/group-name', 'scheduling.k8s.io/group-pod-num', 'scheduling.x-k8s.io/pod-group'])))
{{- end }}

{{/*
Whether the update of a pod must be rewritten like its creation: it has a spelling that is stored in another form, or it
lacks a toleration that the webhook had added. Such a spelling is a resource name that the webhook rewrites at creation,
or an amount of gpu-mem with a unit. If numbers without a unit mean GiB, it is also an amount of gpu-mem that no stored container
has. Tolerations get lost because clients replace the list as a whole. Kubernetes would refuse both kinds of updates, so
an update that it accepts never waits for the webhook.
*/}}
{{- define "cardwise.cel.updateNeedsRewrite" -}}
{{- $amount := "string(c.resources.?limits[?k].orValue('1'))" -}}
{{- $spelled := printf "!%s.matches('^[0-9]+[kMGTPE]?$')" $amount -}}
{{- if eq (include "cardwise.webhook.unit" .) "GiB" }}{{ $spelled = printf "!((oldObject.spec.containers + oldObject.spec.?initContainers.orValue([])).exists(o, string(o.?resources.?limits[?k].orValue('1')) == %s))" $amount }}{{ end -}}
{{- $key := printf "k == 'aliyun.com/gpu-count' || (%s) || (k == 'aliyun.com/gpu-mem' && %s)" (include "cardwise.cel.bareName" .root) $spelled -}}
{{- if eq .root.Values.webhook.nvidiaGpu "take" }}{{ $key = printf "%s || k == 'nvidia.com/gpu'" $key }}{{ end -}}
(object.spec.containers != oldObject.spec.containers || object.spec.?initContainers != oldObject.spec.?initContainers) &&
{{ include "cardwise.cel.amountsAre" (dict "spec" "object.spec" "holds" (printf "!(%s) && (%s)" (include "cardwise.cel.amountsTooLong" .root) (include "cardwise.cel.haveRewritten" .root))) }} &&
{{ include "cardwise.cel.containersHave" (dict "spec" "object.spec" "key" $key) }}
{{- with .root.Values.webhook.toleratedTaints }} ||
object.spec.?tolerations != oldObject.spec.?tolerations &&
{{ include "cardwise.cel.wasRewritten" "oldObject" }} &&
{{ include "cardwise.cel.list" . }}.exists(taint,
  oldObject.spec.?tolerations.orValue([]).exists(t, taint == {{ include "cardwise.cel.taintOf" . }}) &&
  !object.spec.?tolerations.orValue([]).exists(t, taint == {{ include "cardwise.cel.taintOf" . }}))
{{- end }}
{{- end }}

{{/* The taint that the toleration `t` tolerates, in the spelling of webhook.toleratedTaints. */}}
{{- define "cardwise.cel.taintOf" -}}
t.?key.orValue('') + (t.?operator.orValue('') == 'Exists' ? '' : '=' + t.?value.orValue('')) + ':' + t.?effect.orValue('')
{{- end }}

{{/*
Whether the webhook must see the workload whose pod template has its spec at `path`. nvidia.com/gpu counts only if it is
new. Kubernetes accepts it, and the webhook rewrites each pod anyway, so an update of another field must not change the
template: a Job's template is immutable, and a Deployment would start a rollout.
*/}}
{{- define "cardwise.cel.templateIsOurs" -}}
{{ include "cardwise.cel.hasAnnotation" "cardwise.dev/rewritten" }} ||
{{ include "cardwise.cel.templateNeedsRewrite" . }}
{{- end }}

{{/* Whether the template contains a resource name that the webhook must still rewrite. */}}
{{- define "cardwise.cel.templateNeedsRewrite" -}}
{{- $bare := dict "spec" "s" "holds" (include "cardwise.cel.haveBare" .root) -}}
{{- $nvidia := dict "spec" "s" "holds" "amounts.contains('\"nvidia.com/gpu\":')" -}}
[object{{ .path }}.orValue({})].exists(s, {{ include "cardwise.cel.amountsAre" $bare }})
{{- if eq .root.Values.webhook.nvidiaGpu "take" }} ||
([object{{ .path }}.orValue({})].exists(s, {{ include "cardwise.cel.amountsAre" $nvidia }}) &&
 !(oldObject != null && [oldObject{{ .path }}.orValue({})].exists(s, {{ include "cardwise.cel.amountsAre" $nvidia }})))
{{- end }}
{{- end }}

{{/* Whether the `object` has the annotation. */}}
{{- define "cardwise.cel.hasAnnotation" -}}
(has(object.metadata.annotations) && '{{ . }}' in object.metadata.annotations)
{{- end }}

{{/*
Whether the pod is not a mirror of a static pod. A mirror must be admitted unchanged, because the static pod runs on the
node anyway. Only a kubelet's mirrors count, because a user could write the annotation too.
*/}}
{{- define "cardwise.cel.notMirror" -}}
!(has(object.metadata.annotations) && 'kubernetes.io/config.mirror' in object.metadata.annotations && request.userInfo.username.startsWith('system:node:'))
{{- end }}

{{/*
The keys of the map `.` as text, one per line; Kubernetes allows no line breaks in them. The API server's time for a CEL
loop grows with the square of its steps if a step can skip a part (&&, ||, ?:, also filter and exists): 5,000 steps take
more than a second. It does not for map() without these, nor for a search in text. So lists and maps of which a user may
write thousands of entries are searched as text, and only the few matches are looped over.
*/}}
{{- define "cardwise.cel.keys" -}}
{{ . }}.map(k, k).join('\n')
{{- end }}

{{/* A regular expression for the prefixes of annotations that cardwise.cel.placementKey may match. */}}
{{- define "cardwise.cel.placementPrefix" -}}
cardwise[.]dev/|ALIYUN_COM_GPU_MEM_|scheduler[.]framework[.]gpushare[.]allocation
{{- end }}

{{/* Whether the value of a CDI annotation names a GPU, or a device without vendor and class. */}}
{{- define "cardwise.cel.opensCards" -}}
{{ . }}.contains('nvidia.com/') || {{ . }}.contains('cardwise.dev/') || !{{ . }}.matches('^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+=[^,/=]+(,[A-Za-z0-9._-]+/[A-Za-z0-9._-]+=[^,/=]+)*$')
{{- end }}

{{/*
Whether only Cardwise may write the annotation `k`, by the rules of is_placement_annotation in
cardwise/core/api/names.py.
*/}}
{{- define "cardwise.cel.placementKey" -}}
k.startsWith('ALIYUN_COM_GPU_MEM_') || k.startsWith('scheduler.framework.gpushare.allocation') || (k.startsWith('cardwise.dev/') && !(k in ['cardwise.dev/policy', 'cardwise.dev/one-best-node', 'cardwise.dev/defaults', 'cardwise.dev/class', 'cardwise.dev/queue-priority', 'cardwise.dev/isolation', 'cardwise.dev/share-with', 'cardwise.dev/sm-percent', 'cardwise.dev/share-agent', 'cardwise.dev/frameworks', 'cardwise.dev/no-defrag']))
{{- end }}

{{/* Whether the pod `object` is not an infrastructure pod, which manages GPUs itself (DCGM, the GPU Operator). */}}
{{- define "cardwise.cel.notInfrastructure" -}}
!(request.namespace in {{ include "cardwise.cel.list" (include "cardwise.withOwn" (dict "root" . "list" .Values.policies.infrastructure.namespaces) | fromJsonArray) }}) &&
!((request.namespace + '/' + (has(object.spec.serviceAccountName) ? object.spec.serviceAccountName : 'default')) in {{ include "cardwise.cel.list" .Values.policies.infrastructure.serviceAccounts }})
{{- end }}

{{/*
Whether one of the `words` occurs anywhere in the text of the list or map `value`, whatever it means there. This test
costs less than cardwise.cel.keys.
*/}}
{{- define "cardwise.cel.containsAny" -}}
['%s'.format([{{ .value }}])].exists(text, {{ range $i, $word := .words }}{{ if $i }} || {{ end }}text.contains('{{ $word }}'){{ end }})
{{- end }}

{{/*
Whether the env `.` of one or several containers contains a name of cardwise.cel.setsOwnVariable anywhere. Ten
characters of each name suffice, because the cost of a search grows with each ten characters.
*/}}
{{- define "cardwise.cel.namesOwnVariable" -}}
{{ include "cardwise.cel.containsAny" (dict "value" . "words" (list "CUDA_MPS_" "NVIDIA_GPU" "NVIDIA_VIS")) }}
{{- end }}

{{/*
Whether the env of the container `c` sets a variable that opens GPUs or changes limits. In a container with a
share slot (ephemeral containers have none), the webhook's own variables are allowed: a fieldRef, and two limits in
exactly the form that the webhook writes. The webhook itself checks that these limits are equal to the request. Only the node
sets limits of the driver, by CDI.
*/}}
{{- define "cardwise.cel.setsOwnVariable" -}}
c.env.exists(e, e.name.startsWith('NVIDIA_GPU_MEMORY_') || (e.name.startsWith('CUDA_MPS_') && !(
  {{ include "cardwise.cel.hasSlot" . }} && has(e.value) &&
    ((e.name == 'CUDA_MPS_PINNED_DEVICE_MEM_LIMIT' && e.value.matches('^0=[1-9][0-9]*M$')) ||
     (e.name == 'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE' && e.value.matches('^([1-9][0-9]?|100)$'))))) || (e.name == 'NVIDIA_VISIBLE_DEVICES' && !(
  has(e.valueFrom)
    ? (has(e.valueFrom.fieldRef) && e.valueFrom.fieldRef.fieldPath.startsWith("metadata.annotations['cardwise.dev/devices.") &&
       {{ include "cardwise.cel.hasSlot" . }})
    : (!has(e.value) || e.value in ['', 'void', 'none']))))
{{- end }}

{{/* Whether the `amounts` contain GPUs of NVIDIA's own device plugin. */}}
{{- define "cardwise.cel.haveNvidiaCards" -}}
{{- range $i, $name := .Values.policies.nvidiaResources }}{{ if $i }} || {{ end }}
{{- $key := replace "." "[.]" (trimSuffix "*" $name) -}}
amounts.matches('"{{ $key }}{{ if hasSuffix "*" $name }}[^"]*{{ end }}":"[1-9]')
{{- else }}false{{ end -}}
{{- end }}

{{/*
Whether the container `c` requests GPUs of NVIDIA's own device plugin. dyn: the type checker of policies does not know
limits.
*/}}
{{- define "cardwise.cel.nvidiaCards" -}}
['%s'.format([dyn(c).?resources.?limits.orValue({})])].exists(amounts, {{ include "cardwise.cel.haveNvidiaCards" . }})
{{- end }}

{{/*
Whether NVIDIA's runtime gives the container `c` only its share, whatever envFrom and the image contain. Of several
entries with one name the last one counts, so all of them are checked. cardwise.cel.setsOwnVariable checks what a
reference may name. False for an env of more than 1024 variables: the time grows with the square of their number.
*/}}
{{- define "cardwise.cel.closesCards" -}}
has(c.env) && c.env.size() <= 1024 && c.env.exists(e, e.name == 'NVIDIA_VISIBLE_DEVICES') && c.env.all(e, e.name != 'NVIDIA_VISIBLE_DEVICES' || (has(e.value) && e.value == 'void') || (has(e.valueFrom) && {{ include "cardwise.cel.hasSlot" . }}))
{{- end }}

{{/*
The path without empty and "." parts, and without line breaks and tabs, which separate lines and columns in
policies/hostpaths.yaml.
*/}}
{{- define "cardwise.cel.barePath" -}}
'/' + {{ . }}.findAll('[^/.\n\t][^/\n\t]*|[.][^/\n\t]+').join('/')
{{- end }}

{{/*
For each of the `paths`, the first line of variables.hostPathLines that begins with the path followed by `end`.
*/}}
{{- define "cardwise.cel.findMounts" -}}
{{ include "cardwise.cel.list" .paths }}.map(p, '\n' + p + '{{ .end }}').filter(p, variables.hostPathLines.contains(p)).map(p, p + variables.hostPathLines.split(p, 2)[1].split('\n', 2)[0])
{{- end }}

{{/*
Variables of the policies that limit the writes of Cardwise's components. `what`: the resource that is written, such as
pods/status. `changed`: the fields that an update changes, as one list per place. They are single keys of annotations,
labels and a node's capacities, and else the direct fields of metadata, spec and status. `forbiddenChanges`: the changed
fields that the account may not change. Parameter `may`: for each `what` a regular expression of the allowed fields.
dyn: all existing fields are compared, so that new fields of a newer Kubernetes count too.
*/}}
{{- define "cardwise.policy.changes" -}}
{{- $one := "{'at': dyn('%s'), 'end': dyn('%s'), 'now': variables.now%s, 'before': variables.before%s}" -}}
- name: what
  expression: "request.resource.resource + (request.?subResource.orValue('') == '' ? '' : '/' + request.subResource)"
- name: now
  expression: "object == null || oldObject == null ? dyn({}) : dyn(object)"
- name: before
  expression: "object == null || oldObject == null ? dyn({}) : dyn(oldObject)"
- name: places
  expression: >-
    [{{ printf $one "" "" "" "" }}
    {{- range list "metadata" "spec" "status" }}
    {{- $inner := printf ".?%s.orValue({})" . }},
    {{ printf $one (print . ".") "" $inner $inner }}
    {{- end }}
    {{- range list "metadata.annotations" "metadata.labels" "status.capacity" "status.allocatable" }}
    {{- $inner := printf ".?%s.orValue({})" (replace "." ".?" .) }},
    {{ printf $one (print . "[") "]" $inner $inner }}
    {{- end }}]
- name: changed
  expression: >-
    variables.places.map(p, (p.now.filter(k, !(k in p.before) || p.now[k] != p.before[k]) + p.before.filter(k, !(k in p.now))).map(k, string(p.at) + k + string(p.end)))
- name: forbiddenChanges
  expression: >-
    variables.changed.map(fields, fields.filter(field, !(field in [
    'metadata', 'spec', 'status', 'metadata.annotations', 'metadata.labels', 'status.capacity', 'status.allocatable',
    'metadata.managedFields', 'metadata.resourceVersion', 'metadata.generation']) && !field.matches({
    {{- range $i, $what := keys .may | sortAlpha }}{{ if $i }}, {{ end }}'{{ $what }}': r'^({{ get $.may $what }})$'{{ end -}}
    }[?variables.what].orValue('^$')))).filter(fields, fields.size() > 0)
{{- end }}

{{- define "cardwise.policy.onlyAllowedFields" -}}
- expression: variables.forbiddenChanges.size() == 0
  messageExpression: "'the {{ . }} may not change ' + variables.forbiddenChanges[0][0] + ' of ' + variables.what"
  message: the {{ . }} may not change this field
  reason: Forbidden
{{- end }}

{{/*
Refuses Secrets of other types than Opaque: Kubernetes fills a Secret for tokens with the token of the ServiceAccount
that it names.
*/}}
{{- define "cardwise.policy.opaqueSecret" -}}
- expression: variables.what != 'secrets' || dyn(object).type == 'Opaque'
  message: the {{ . }} may create a Secret of type Opaque only
  reason: Forbidden
{{- end }}
