// Renders a chart's templates with Go's own template engine and the few functions of Helm's that
// they use: `go run render_chart.go TEMPLATE... < VALUES.json`.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"text/template"
)

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	var values map[string]any
	fail(json.NewDecoder(os.Stdin).Decode(&values))
	functions := template.FuncMap{
		"toYaml": func(value any) (string, error) { // JSON is YAML
			text, err := json.Marshal(value)
			return string(text), err
		},
		"nindent": func(count int, text string) string {
			pad := "\n" + strings.Repeat(" ", count)
			return pad + strings.ReplaceAll(text, "\n", pad)
		},
		"quote": func(value any) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"required": func(why string, value any) (any, error) {
			if value == nil || value == "" {
				return nil, errors.New(why)
			}
			return value, nil
		},
	}
	for _, file := range os.Args[1:] {
		text, err := os.ReadFile(file)
		fail(err)
		made, err := template.New(file).Funcs(functions).Option("missingkey=error").Parse(string(text))
		fail(err)
		fmt.Println("---")
		fail(made.Execute(os.Stdout, map[string]any{"Values": values, "Release": map[string]any{"Name": "kv"}}))
	}
}
